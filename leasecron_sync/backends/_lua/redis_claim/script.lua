-- Claims by setting a key once, version 1. KEYS: a string of the run, which holds the decision that won
-- until twice the window after the run was due, and for ten minutes at least: others may have a longer
-- window.
local USUAL_MS = 600000
local wrong = check_types('string')
if wrong then
  return wrong
end
return decide(function(key, claim, is_old)
  local winner = redis.call('GET', key)
  if winner then
    return winner == claim.decision_id
  end
  if is_old then
    return nil
  end
  local keep_ms = claim.due_ms + math.max(2 * claim.window_ms, USUAL_MS) - now
  redis.call('SET', key, claim.decision_id, 'PX', text(keep_ms))
  return true
end)
