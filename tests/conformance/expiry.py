"""Keys of Redis that expire by a clock that tests move."""

from __future__ import annotations

from tests.services.redis import execute

_AGE = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local left_ms = redis.call('PTTL', key)
  if left_ms >= 0 and left_ms <= tonumber(ARGV[2]) then
    redis.call('DEL', key)
  elseif left_ms >= 0 then
    redis.call('PEXPIRE', key, left_ms - ARGV[2])
  end
end
"""


def age(url: str, namespace: str, ms: int) -> None:
    """Let the keys of namespaces expire sooner.

    Args:
        url: Of the server.
        namespace: How their names begin; without special characters.
        ms: By how much.
    """
    execute(url, "EVAL", _AGE, 0, f"leasecron:{{{namespace}*", ms)
