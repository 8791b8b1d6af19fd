-- Notes since when the scheduled times of each job are owed, version 1. ARGV from 3: job and
-- fingerprint of each. Returns the store's clock and id, and for each job: owed_from_ms, newest_ms or
-- an empty text, and why its record is left as it is.
local FORMER_SCHEDULE_MS = 600000
local FORMER_SCHEDULES = 8

local function newest_pruned(job)
  local newest = job.pruned_to_ms
  if not newest or newest <= now then
    return newest
  end
  local past
  for place = 1, #job.spans, 2 do
    if tonumber(job.spans[place]) <= now then
      past = math.max(past or -math.huge, math.min(tonumber(job.spans[place + 1]), now))
    end
  end
  return past
end

local function change(job, fingerprint)
  local owed_from_ms = now
  local found = false
  local kept = {job.fingerprint, text(job.owed_from_ms), text(now)}
  for place = 1, #job.former, 3 do
    local name, owed, displaced = job.former[place], job.former[place + 1], job.former[place + 2]
    -- In both directions: one displaced under a clock that was far ahead is not recent for years.
    if math.abs(now - tonumber(displaced)) < FORMER_SCHEDULE_MS then
      if name == fingerprint and not found then
        found = true
        owed_from_ms = math.min(tonumber(owed), now)
      end
      if name ~= fingerprint and name ~= job.fingerprint and #kept < 3 * FORMER_SCHEDULES then
        kept[#kept + 1] = name
        kept[#kept + 1] = owed
        kept[#kept + 1] = displaced
      end
    end
  end
  job.owed_from_ms, job.fingerprint, job.former = owed_from_ms, fingerprint, kept
end

local function register(job, fingerprint)
  local before_ms = job.owed_from_ms
  if not before_ms then
    job.owed_from_ms, job.fingerprint = now, fingerprint
    put_job(job)
  elseif job.fingerprint ~= fingerprint then
    change(job, fingerprint)
    put_job(job)
  elseif before_ms > now then
    job.owed_from_ms = now
    put_job(job)
  end
end

local store_id = meet_store()
local rows = {}
for place = 3, #ARGV, 2 do
  local job, why = get_job(ARGV[place])
  if not job then
    rows[#rows + 1] = {now, '', why}
  else
    local newest = newest_pruned(job)
    register(job, ARGV[place + 1])
    redis.call('ZADD', NAMES, 0, job.name) -- also one that was lost
    local last = redis.call(
      'ZREVRANGEBYLEX', TIMES, '[' .. member(job.name, now), '[' .. prefix(job.name), 'LIMIT', 0, 1
    )
    if last[1] then
      local _, ms = key_of(last[1])
      newest = math.max(newest or -math.huge, ms)
    end
    rows[#rows + 1] = {job.owed_from_ms, newest or '', ''}
  end
end
return {now, store_id, rows}
