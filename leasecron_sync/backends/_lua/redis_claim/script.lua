-- Claims by setting a key once, version 1. KEYS: a string of the run, which holds the decision that won
-- for as long as that matters.
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
  redis.call('SET', key, claim.decision_id, 'PX', text(matters_until(claim) - now))
  return true
end)
