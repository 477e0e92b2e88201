"""Other systems, measured in processes of their own, by turns with ours. None of them is a dependency."""
