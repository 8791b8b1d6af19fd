-- Tells which runs of these jobs are claimable now, version 1. ARGV from 3: the asker, then the jobs.
-- Returns the time until the next one or an empty text, whether there is a run that the asker does
-- not hold, and job and scheduled time of each.
--
-- Where overlap is forbidden, a lapsed run goes before a waiting one, since a waiting run is deferred
-- until the lapsed one is settled; among equals the older one goes first.
local asker = ARGV[3]
local next_ms, unsettled, found = nil, 0, {}

local function add(record)
  found[#found + 1] = {record.job, record.ms}
end

for place = 4, #ARGV do
  local live, lapsed, due
  for _, m in ipairs(members(OPEN, ARGV[place])) do -- the oldest first
    local record = get_run(m) -- without what cannot be read
    if record then
      local is_free = record.overlap == 1
      if is_live(record) then
        live = true
      end
      if is_overlong(record) then
        add(record)
      elseif is_lapsed(record) then
        if is_free then add(record) else lapsed = lapsed or record end
      elseif is_due(record) then
        if is_free then add(record) else due = due or record end
      end
      if record.until_ms > now then
        next_ms = math.min(next_ms or math.huge, record.until_ms)
      end
      if not (is_live(record) and record.holder == asker) then
        unsettled = 1
      end
    end
  end
  local first = lapsed or due
  if first and not live then
    add(first)
  end
end
return {next_ms and next_ms - now or '', unsettled, found}
