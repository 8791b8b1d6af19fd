-- Claims by adding to a stream under an explicit id, version 1. KEYS: the stream of the job. The id of
-- an entry is the scheduled time of a run; it holds the decision that won, and until when that matters.
--
-- A stream takes rising ids only, also after its entries are gone: an older run cannot be told from a
-- taken one. The stream goes when nothing in it matters any more.
local SWEEP = 10

local wrong = check_types('stream')
if wrong then
  return wrong
end
return decide(function(key, claim, is_old)
  if claim.ms < 1 then -- no id can be made of it
    return nil
  end
  local id = text(claim.ms) .. '-0'
  local entry = redis.call('XRANGE', key, id, id)[1]
  if entry then
    return entry[2][2] == claim.decision_id
  end
  if is_old then
    return nil
  end
  local left_ms = redis.call('PTTL', key)
  local until_ms = matters_until(claim)
  local added = redis.pcall('XADD', key, id, 'decision', claim.decision_id, 'until', text(until_ms))
  if type(added) == 'table' then
    if string.find(added.err, 'equal or smaller') then
      return false
    end
    error(added)
  end
  if left_ms == -2 or left_ms >= 0 and left_ms < until_ms - now then
    redis.call('PEXPIRE', key, text(until_ms - now))
  end
  for _, old in ipairs(redis.call('XRANGE', key, '-', '+', 'COUNT', SWEEP)) do
    local matters_until_ms = tonumber(old[2][4])
    if not matters_until_ms or matters_until_ms >= now then
      break
    end
    redis.call('XDEL', key, old[1])
  end
  return true
end)
