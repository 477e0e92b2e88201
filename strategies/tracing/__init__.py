"""Where the time of steps goes: a timeline of every replica, in a file that Perfetto and Chrome open."""

from strategies.tracing.spans import span as span
from strategies.tracing.trace import Trace as Trace
