-- Reports how attempts ended, in turn, version 1. ARGV from 3: job, scheduled_ms, token, outcome,
-- reason and delay_ms of each. Returns for each: accepted, state, wait_ms, and why its record cannot
-- be read.
local FREE_HAND_OVERS = 9

local function settle(record, outcome, reason, delay_ms)
  record.decision_id = ''
  record.reason = reason
  if outcome == 'finished' then
    record.state = 'finished'
  else
    local counted, wait_ms = 1, delay_ms
    if outcome == 'handed_over' then
      record.hand_overs = record.hand_overs + 1
      counted, wait_ms = record.hand_overs > FREE_HAND_OVERS and 1 or 0, 0
    end
    record.failures = record.failures + counted
    if counted > 0 and record.failures >= record.max_attempts then
      record.state = 'failed'
    else
      record.state = 'waiting'
      record.until_ms = now + wait_ms
    end
  end
  record.settled_ms = is_settled(record) and now or nil
  put_run(record)
end

local rows = {}
for place = 3, #ARGV, 6 do
  local record, why = get_run(member(ARGV[place], tonumber(ARGV[place + 1])))
  local accepted, wait_ms = false, 0
  if record and record.token == tonumber(ARGV[place + 2]) then
    if record.state == 'running' then
      accepted = true
      settle(record, ARGV[place + 3], ARGV[place + 4], tonumber(ARGV[place + 5]))
    else
      -- The token's own settlement, asked again after a lost reply. One that a claim or pruning
      -- settled has a decision id: it was taken out of the holder's hands.
      accepted = record.decision_id == ''
    end
    if accepted and record.state == 'waiting' then
      wait_ms = math.max(0, record.until_ms - now)
    end
  end
  rows[#rows + 1] = {accepted and 1 or 0, record and record.state or '', wait_ms, why or ''}
end
return rows
