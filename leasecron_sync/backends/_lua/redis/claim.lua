-- Decides claims in turn, version 1. ARGV from 3: the id of the store that the jobs are registered in,
-- or empty; a JSON array of job, scheduled_ms, due_ms, holder, decision_id, lease_ms, max_attempts,
-- on_overlap, max_age_ms, takeover_ms of each.
--
-- Returns a JSON array with an element for each: verdict, token, attempt, failures, ms, takeover,
-- state, reason, fresh, unsettled, and the scheduled times that it abandoned; large numbers as texts.
-- (One text each way: in a batch of many claims the protocol's own elements cost more than deciding.)
-- The line numbers are those of the decision table.
local function reply(verdict, fields)
  local row = {
    verdict = verdict, token = 0, attempt = 0, failures = 0, ms = 0, takeover = 0, state = '',
    reason = '', fresh = 0, abandoned = {},
  }
  for name, value in pairs(fields or {}) do
    row[name] = value
  end
  return row
end

local function settled(record, fresh)
  return reply('settled', {state = record.state, reason = record.reason, fresh = fresh and 1 or 0})
end

local function granted(record, left_ms, takeover)
  return reply('granted', {
    token = record.token, attempt = record.attempt, failures = record.failures, ms = left_ms,
    takeover = takeover and 1 or 0, state = 'running', fresh = 1,
  })
end

local function set_failed(record, decision_id, reason, failures)
  record.state = 'failed'
  record.decision_id = decision_id
  record.failures = failures
  record.settled_ms = now
  record.reason = reason
  put_run(record)
end

local function failed(record, c, reason, failures)
  set_failed(record, c.decision_id, reason, failures)
  return settled(record, true)
end

local function deferred(record, blockers)
  local first = math.huge
  for _, other in ipairs(blockers) do
    first = math.min(first, other.until_ms)
  end
  return reply('deferred', {ms = math.max(0, first - now), state = record and record.state or ''})
end

local function grant(record, job, c, takeover)
  -- Never below the store's clock: tokens go on rising when the job's record was lost.
  record.token = math.max(job.last_token + 1, now)
  record.state = 'running'
  record.attempt = record.attempt + 1
  record.holder = c.holder
  record.decision_id = c.decision_id
  record.until_ms = now + c.lease_ms
  record.lease_ms = c.lease_ms
  record.max_attempts = c.max_attempts
  record.overlap = c.on_overlap == 'allow' and 1 or 0
  record.takeover_ms = c.takeover_ms
  record.claimed_ms = now
  record.settled_ms = nil
  record.reason = ''
  job.last_token = record.token
  put_run(record)
  put_job(job)
  return granted(record, c.lease_ms, takeover)
end

local function was_pruned(job, ms)
  local newest = job.pruned_to_ms
  if not newest or ms > newest then
    return false
  end
  if newest <= now then
    return true
  end
  for place = 1, #job.spans, 2 do
    if tonumber(job.spans[place]) <= ms and ms <= tonumber(job.spans[place + 1]) then
      return true
    end
  end
  return false
end

local function claim_live(record, c)
  if is_overlong(record) then
    record.until_ms = now + record.lease_ms
    put_run(record)
  end
  local left_ms = record.until_ms - now
  if record.decision_id == c.decision_id then -- line 1
    return granted(record, left_ms, false)
  end
  return reply('held', {ms = left_ms, state = record.state}) -- line 3
end

local function chosen(others, test)
  local found = {}
  for _, other in ipairs(others) do
    if test(other) then
      found[#found + 1] = other
    end
  end
  return found
end

local function claim_lapsed(record, job, others, c) -- line 4
  local failures = record.failures + 1 -- the attempt whose runner was lost
  if now - record.until_ms > c.takeover_ms then
    return failed(record, c, 'abandoned', failures)
  end
  if failures >= c.max_attempts then
    return failed(record, c, 'runner lost', failures)
  end
  if c.on_overlap ~= 'allow' then
    local blockers = chosen(others, is_live)
    if #blockers > 0 then
      return deferred(record, blockers)
    end
  end
  record.failures = failures
  return grant(record, job, c, true)
end

local function claim_waiting(record, job, others, c) -- line 5
  if not is_due(record) then
    return reply('waiting', {ms = record.until_ms - now, state = record.state})
  end
  if now - record.until_ms > c.takeover_ms then
    return failed(record, c, 'abandoned', record.failures)
  end
  if c.on_overlap ~= 'allow' then
    local blockers = chosen(others, function(other) return other.state == 'running' end)
    if #blockers > 0 then
      return deferred(record, blockers)
    end
  end
  return grant(record, job, c, false)
end

local function fresh_run(c)
  return {
    member = c.member, job = c.job, ms = c.ms, state = 'running', token = 0, attempt = 0,
    failures = 0, hand_overs = 0, holder = '', decision_id = '', until_ms = 0, lease_ms = 0,
    max_attempts = 1, overlap = 0, takeover_ms = 0, reason = '',
  }
end

local function skip(c)
  local record = fresh_run(c)
  record.state = 'skipped'
  record.holder = c.holder
  record.decision_id = c.decision_id
  record.settled_ms = now
  record.reason = 'overlap'
  put_run(record)
  return settled(record, true)
end

local function claim_new(job, others, c) -- line 6
  if now < c.due_ms then
    return reply('early', {ms = c.due_ms - now})
  end
  if was_pruned(job, c.ms) or now - c.due_ms > c.max_age_ms then
    return reply('too_old')
  end
  local stale = {}
  if c.on_overlap ~= 'allow' then
    local function is_stale(other)
      return is_lapsed(other) and now - other.until_ms > c.takeover_ms
    end
    stale = chosen(others, is_stale)
    local blockers = chosen(others, function(other)
      return other.state == 'running' and not is_stale(other) or other.ms < c.ms and is_due(other)
    end)
    if #blockers > 0 and c.on_overlap == 'skip' then
      return skip(c)
    end
    if #blockers > 0 then
      return deferred(nil, blockers)
    end
    -- A run that lapsed too long ago does not hold its job up. It is settled here and now: left as
    -- it is, a late renewal would make it a second running run of the job.
    for _, other in ipairs(stale) do
      set_failed(other, c.decision_id, 'abandoned', other.failures + 1)
    end
  end
  local row = grant(fresh_run(c), job, c, false)
  for _, other in ipairs(stale) do
    row.abandoned[#row.abandoned + 1] = other.ms
  end
  return row
end

local function claim(c)
  local record, why = get_run(c.member)
  local job, others = nil, {}
  if not why then
    job, why = get_job(c.job)
  end
  if why then
    return reply('rejected', {reason = why})
  end
  local unsettled = 0
  for _, m in ipairs(members(OPEN, c.job)) do
    if m ~= c.member then
      local other
      other, why = get_run(m)
      if why then
        return reply('rejected', {reason = why})
      end
      if other then
        others[#others + 1] = other
      end
    end
  end
  -- Read before anything changes: what is abandoned is left out.
  local rest = {}
  for _, other in ipairs(others) do
    rest[other.ms] = not (is_live(other) and other.holder == c.holder) or nil
  end
  local row
  if not record then
    row = claim_new(job, others, c)
  elseif is_settled(record) then -- lines 1 and 2
    row = settled(record, record.decision_id == c.decision_id)
  elseif record.state == 'waiting' then
    row = claim_waiting(record, job, others, c)
  elseif is_live(record) then
    row = claim_live(record, c)
  else
    row = claim_lapsed(record, job, others, c)
  end
  for _, ms in ipairs(row.abandoned) do
    rest[ms] = nil
  end
  if row.verdict == 'held' or row.verdict == 'waiting' or row.verdict == 'deferred'
    or next(rest) ~= nil then
    unsettled = 1
  end
  row.unsettled = unsettled
  return row
end

local store_id = meet_store()
-- Else nobody would notice that the store has lost its data, and look what is owed now.
if ARGV[3] ~= '' and ARGV[3] ~= store_id then
  return redis.error_reply('LEASECRON_LOST the data')
end
local parts, rows = cjson.decode(ARGV[4]), {}
for place = 1, #parts, 10 do
  local c = {
    job = parts[place],
    ms = parts[place + 1],
    due_ms = parts[place + 2],
    holder = parts[place + 3],
    decision_id = parts[place + 4],
    lease_ms = parts[place + 5],
    max_attempts = parts[place + 6],
    on_overlap = parts[place + 7],
    max_age_ms = parts[place + 8],
    takeover_ms = parts[place + 9],
  }
  c.member = member(c.job, c.ms)
  local r = claim(c)
  for number, ms in ipairs(r.abandoned) do
    r.abandoned[number] = text(ms)
  end
  rows[#rows + 1] = {
    r.verdict, text(r.token), r.attempt, r.failures, text(r.ms), r.takeover, r.state, r.reason,
    r.fresh, r.unsettled or 0, r.abandoned,
  }
end
return cjson.encode(rows)
