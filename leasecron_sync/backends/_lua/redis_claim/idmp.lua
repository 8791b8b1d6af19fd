-- Claims by adding to a stream under an idempotent id, version 1, in Redis 8.6 or newer. KEYS: the stream
-- of the namespace. Its map remembers which entry an id was added as, and the entry holds the decision
-- that won.
--
-- The length of that memory is a constant of the format: any change of it wipes the map.
local KEEP_S, KEEP_IDS = '600', '10000'

local wrong = check_types('stream')
if wrong then
  return wrong
end

local function meet_stream(key)
  if redis.call('EXISTS', key) == 1 then
    local facts = redis.call('XINFO', 'STREAM', key)
    local found = {}
    for place = 1, #facts, 2 do
      found[facts[place]] = tostring(facts[place + 1])
    end
    if found['idmp-duration'] ~= KEEP_S or found['idmp-maxsize'] ~= KEEP_IDS then
      return redis.error_reply('LEASECRON_SETTINGS ' .. key)
    end
    return nil
  end
  local answer = redis.pcall('XCFGSET', key, 'IDMP-DURATION', KEEP_S, 'IDMP-MAXSIZE', KEEP_IDS)
  if not string.find(answer.err, 'no such key') then
    return redis.error_reply('LEASECRON_IDMP ' .. answer.err)
  end
  redis.call('XADD', key, '*', 'made', text(now))
  redis.call('XCFGSET', key, 'IDMP-DURATION', KEEP_S, 'IDMP-MAXSIZE', KEEP_IDS)
  return nil
end

wrong = meet_stream(KEYS[1])
if wrong then
  return wrong
end
local time = redis.call('TIME') -- the ids of entries go by it, whatever tests say
local oldest_ms = time[1] * 1000 - 2000 * KEEP_S
return decide(function(key, claim, is_old)
  if is_old then -- asking would add it
    return nil
  end
  local id = redis.call(
    'XADD', key, 'MINID', '~', text(oldest_ms), 'IDMP', claim.job, text(claim.ms), '*',
    'decision', claim.decision_id
  )
  local entry = redis.call('XRANGE', key, id, id)[1]
  return entry ~= nil and entry[2][2] == claim.decision_id
end)
