-- Returns the known states in each span, version 1. ARGV from 3: job, from_ms and to_ms of each.
local rows = {}
for place = 3, #ARGV, 3 do
  local job, row = ARGV[place], {}
  local first, last = member(job, tonumber(ARGV[place + 1])), member(job, tonumber(ARGV[place + 2]))
  for _, m in ipairs(redis.call('ZRANGEBYLEX', TIMES, '[' .. first, '[' .. last)) do
    local _, ms = key_of(m)
    local record, why = get_run(m)
    -- A record of a newer version says at least that the run is known, so it is not owed. One that is
    -- gone, as its key was evicted, says nothing: the run is owed, and a claim would be granted.
    if record or why then
      row[#row + 1] = ms
      row[#row + 1] = record and record.state or 'running'
    end
  end
  rows[#rows + 1] = row
end
return rows
