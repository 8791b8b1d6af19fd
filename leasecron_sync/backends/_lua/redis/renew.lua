-- Extends each lease whose token is still its run's, version 1. ARGV from 3: lease_ms, then job,
-- scheduled_ms and token of each. Returns 1 or 0 for each.
local lease_ms = tonumber(ARGV[3])
local rows = {}
for place = 4, #ARGV, 3 do
  -- What cannot be read is lost: only a newer version's takeover can have written it.
  local record = get_run(member(ARGV[place], tonumber(ARGV[place + 1])))
  local held = record and record.state == 'running' and record.token == tonumber(ARGV[place + 2])
  if held then
    record.until_ms = now + lease_ms
    put_run(record)
  end
  rows[#rows + 1] = held and 1 or 0
end
return rows
