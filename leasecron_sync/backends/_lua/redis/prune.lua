-- Settles as abandoned what lapsed or fell due too long ago, and deletes old settled runs, at most so
-- many of each, version 1. ARGV from 3: older_than_ms, the limit. Returns how many were deleted, and
-- job and scheduled time of what was abandoned.
local PRUNED_SPANS = 8
local older_than_ms, limit = tonumber(ARGV[3]), tonumber(ARGV[4])
local before_ms = now - older_than_ms

-- What lies close together is one span; of more than a few, those are joined that have the smallest
-- hole between them, the first of equal ones first.
local function with_pruned(spans, times)
  local pairs_ = {}
  for place = 1, #spans, 2 do
    pairs_[#pairs_ + 1] = {tonumber(spans[place]), tonumber(spans[place + 1])}
  end
  for _, ms in ipairs(times) do
    pairs_[#pairs_ + 1] = {ms, ms}
  end
  table.sort(pairs_, function(a, b)
    return a[1] < b[1] or a[1] == b[1] and a[2] < b[2]
  end)
  local joined = {}
  for _, span in ipairs(pairs_) do
    local last = joined[#joined]
    if last and span[1] - last[2] <= math.floor(older_than_ms / 2) then
      last[2] = math.max(last[2], span[2])
    else
      joined[#joined + 1] = span
    end
  end
  while #joined > PRUNED_SPANS do
    local place, smallest = 1, math.huge
    for number = 1, #joined - 1 do
      local hole = joined[number + 1][1] - joined[number][2]
      if hole < smallest then
        place, smallest = number, hole
      end
    end
    joined[place][2] = joined[place + 1][2]
    table.remove(joined, place + 1)
  end
  local found = {}
  for _, span in ipairs(joined) do
    found[#found + 1] = text(span[1])
    found[#found + 1] = text(span[2])
  end
  return found
end

meet_store()
local abandoned = {}
-- What cannot be read stays, and must not hide what lies behind it.
local offset = 0
while #abandoned < limit do
  local old = redis.call(
    'ZRANGEBYSCORE', UNTIL, '-inf', '(' .. text(before_ms), 'LIMIT', offset, limit - #abandoned
  )
  if #old == 0 then
    break
  end
  for _, m in ipairs(old) do
    local record = get_run(m)
    if record and not is_settled(record) then
      record.failures = record.failures + (record.state == 'running' and 1 or 0)
      record.state = 'failed'
      record.decision_id = 'store'
      record.settled_ms = now
      record.reason = 'abandoned'
      put_run(record)
      abandoned[#abandoned + 1] = {record.job, record.ms}
    else
      offset = offset + 1
    end
  end
end

local old = redis.call(
  'ZRANGEBYSCORE', SETTLED, '-inf', '(' .. text(before_ms), 'LIMIT', 0, limit
)
local times, names = {}, {}
for _, m in ipairs(old) do
  local job, ms = key_of(m)
  if not times[job] then
    times[job] = {}
    names[#names + 1] = job
  end
  table.insert(times[job], ms)
end
for _, name in ipairs(names) do
  local job = get_job(name)
  if job then -- what cannot be noted is not granted again either
    local newest = times[name][#times[name]]
    job.pruned_to_ms = math.max(job.pruned_to_ms or newest, newest)
    job.spans = with_pruned(job.spans, times[name])
    put_job(job)
  end
end
for _, m in ipairs(old) do
  redis.call('HDEL', RUNS, m)
  redis.call('ZREM', TIMES, m)
  redis.call('ZREM', SETTLED, m)
end
return {#old, abandoned}
