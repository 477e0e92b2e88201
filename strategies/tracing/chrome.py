"""The timeline as Chrome trace events, the JSON that ui.perfetto.dev and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strategies.tracing.timeline import Timeline

_PROCESS = 1


def chrome_trace(timeline: Timeline, title: str, tracks: Sequence[str], about: Mapping[str, Any]) -> bytes:
    """The content of a file.

    Args:
        timeline: what happened.
        title: of the whole.
        tracks: the replicas' names, as many and in the order of ``timeline.replicas``.
        about: more to stand in the file, of types that JSON has.
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": _PROCESS, "tid": 0, "args": {"name": title}}
    ]
    for replica, track in zip(timeline.replicas, tracks, strict=True):
        for name, args in (("thread_name", {"name": track}), ("thread_sort_index", {"sort_index": replica})):
            events.append({"name": name, "ph": "M", "pid": _PROCESS, "tid": replica, "args": args})
    for interval in timeline.intervals():
        event: dict[str, Any] = {
            "name": interval.name,
            "cat": interval.kind.value,
            "ph": "X",
            "pid": _PROCESS,
            "tid": interval.replica,
            # Microseconds from the start; three decimals keep the nanoseconds.
            "ts": (interval.began - timeline.began) / 1e3,
            "dur": (interval.ended - interval.began) / 1e3,
        }
        if interval.args:
            event["args"] = dict(interval.args)
        events.append(event)
    lines = ",\n".join(json.dumps(event, ensure_ascii=False, default=str) for event in events)
    head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about)}, ensure_ascii=False, default=str)
    return f'{head[:-1]}, "traceEvents": [\n{lines}\n]}}\n'.encode()
