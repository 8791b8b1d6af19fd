-- Of every script of store format 1, version 1: what stands before the command itself.
--
-- KEYS, the first eight under the hash tag of the namespace:
--   1 meta     hash: store_id, format
--   2 names    sorted set of the jobs' names, by name
--   3 jobs     hash: the record of a job by its name
--   4 runs     hash: the record of a run by its member
--   5 times    sorted set of all runs, by member
--   6 open     sorted set of the unsettled runs, by member
--   7 until    sorted set of the unsettled runs, by until_ms
--   8 settled  sorted set of the settled runs, by scheduled time
--   9 store    hash: store_id, and the namespaces that were ever made; one for all namespaces, or
--              in a cluster, where that cannot be, for each
-- ARGV: 1 the clock that tests give, else empty; 2 the id of a store that is made now; then the
-- arguments of the command.
--
-- A member is the length of the job's name, the name, and the scheduled time with leading zeros: the
-- runs of a job lie side by side in their order, whatever its name. A record is a JSON array of
-- texts: numbers would keep 14 digits only. Its first element is its format.
local META, NAMES, JOBS, RUNS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local TIMES, OPEN, UNTIL, SETTLED, STORE = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local FORMAT = 1
local SHIFT = 1e15 -- keeps times before 1970 in their order
local MAX_RETRY_DELAY_MS = 300000
local KNOWN = {running = true, waiting = true, finished = true, failed = true, skipped = true}

-- Before anything is written: a script that fails half-way is not rolled back.
local TYPES = {'hash', 'zset', 'hash', 'hash', 'zset', 'zset', 'zset', 'zset', 'hash'}
for place, wanted in ipairs(TYPES) do
  local found = redis.call('TYPE', KEYS[place]).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('LEASECRON_TYPE ' .. KEYS[place] .. ' is a ' .. found)
  end
end
local store_format = redis.call('HGET', META, 'format')
if store_format and (tonumber(store_format) or math.huge) > FORMAT then
  return redis.error_reply('LEASECRON_FORMAT ' .. store_format)
end

local now
if ARGV[1] == '' then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
else
  now = tonumber(ARGV[1])
end

local function text(number) -- whole, and a third of the time that '%.0f' takes
  return string.format('%d', number)
end

local function prefix(job)
  return #job .. ':' .. job .. ':'
end

local function member(job, ms)
  local within = math.max(-9e14, math.min(9e14, ms))
  return prefix(job) .. string.format('%016d', within + SHIFT)
end

local function key_of(m)
  local length, start = string.match(m, '^(%d+):()')
  return string.sub(m, start, start + tonumber(length) - 1), tonumber(string.sub(m, -16)) - SHIFT
end

local function members(key, job)
  local of_job = prefix(job)
  return redis.call('ZRANGEBYLEX', key, '[' .. of_job, '(' .. of_job .. ':')
end

local function meet_store()
  local id = redis.call('HGET', META, 'store_id')
  if not id then
    id = redis.call('HGET', STORE, 'store_id')
    -- A namespace that was there before has lost its records: it is another store from now on.
    if not id or redis.call('HEXISTS', STORE, META) == 1 then
      id = ARGV[2]
    end
    redis.call('HSETNX', STORE, 'store_id', id)
    redis.call('HSET', STORE, META, id)
    redis.call('HSET', META, 'store_id', id, 'format', text(FORMAT))
  end
  return id
end

-- -- records -------------------------------------------------------------------------------------

local function decoded(packed)
  local good, parts = pcall(cjson.decode, packed)
  if not good or type(parts) ~= 'table' then
    return nil, 'damaged'
  end
  local format = tonumber(parts[1])
  if not format then
    return nil, 'damaged'
  end
  if format > FORMAT then
    return nil, 'format ' .. tostring(parts[1])
  end
  return parts
end

-- Field, and whether it is a number (true), a number or nothing ('?'), or a text (false).
local FIELDS = {
  {'state', false}, {'token', true}, {'attempt', true}, {'failures', true}, {'hand_overs', true},
  {'holder', false}, {'decision_id', false}, {'until_ms', true}, {'lease_ms', true},
  {'max_attempts', true}, {'overlap', true}, {'takeover_ms', true}, {'claimed_ms', '?'},
  {'settled_ms', '?'}, {'reason', false},
}

-- Also "nan", "inf" and what a double cannot hold exactly would be read as numbers.
local function number_of(value)
  local read = tonumber(value)
  return read and math.abs(read) < 2^53 and read or nil
end

local function run_of(packed, m)
  local parts, why = decoded(packed)
  if not parts then
    return nil, why
  end
  local record = {member = m}
  record.job, record.ms = key_of(m)
  for place, field in ipairs(FIELDS) do
    local name, number = field[1], field[2]
    local value = parts[place + 1]
    if type(value) ~= 'string' then
      return nil, 'damaged'
    end
    if number then
      local read = number_of(value)
      if not read and not (number == '?' and value == '') then
        return nil, 'damaged'
      end
      value = read
    end
    record[name] = value
  end
  if not KNOWN[record.state] then
    return nil, 'state ' .. record.state
  end
  return record
end

-- Returns nothing where there is no record, and why where it cannot be read.
local function get_run(m)
  local packed = redis.call('HGET', RUNS, m)
  if not packed then
    return nil
  end
  return run_of(packed, m)
end

local function is_settled(record)
  return record.state ~= 'running' and record.state ~= 'waiting'
end

local function put_run(record)
  local parts = {text(FORMAT)}
  for place, field in ipairs(FIELDS) do
    local value = record[field[1]]
    if field[2] then
      value = value and text(value) or ''
    end
    parts[place + 1] = value
  end
  local m = record.member
  redis.call('HSET', RUNS, m, cjson.encode(parts))
  redis.call('ZADD', TIMES, 0, m)
  if is_settled(record) then
    redis.call('ZREM', OPEN, m)
    redis.call('ZREM', UNTIL, m)
    redis.call('ZADD', SETTLED, text(record.ms), m)
  else
    redis.call('ZADD', OPEN, 0, m)
    redis.call('ZADD', UNTIL, text(record.until_ms), m)
  end
end

-- Texts of numbers in groups; of three the first one is a name.
local function numbers(texts, every)
  if type(texts) ~= 'table' or #texts % every ~= 0 then
    return nil
  end
  for place, value in ipairs(texts) do
    local is_name = every == 3 and place % 3 == 1
    if type(value) ~= 'string' or not (is_name or number_of(value)) then
      return nil
    end
  end
  return texts
end

-- Returns a fresh record where there is none, and nothing and why where it cannot be read.
local function get_job(name)
  local packed = redis.call('HGET', JOBS, name)
  if not packed then
    return {name = name, last_token = 0, fingerprint = '', former = {}, spans = {}}
  end
  local parts, why = decoded(packed)
  if not parts then
    return nil, why
  end
  local job = {
    name = name,
    stored = true,
    last_token = number_of(parts[2]),
    pruned_to_ms = number_of(parts[3]),
    owed_from_ms = number_of(parts[4]),
    fingerprint = parts[5],
    former = numbers(parts[6], 3),
    spans = numbers(parts[7], 2),
  }
  if not (job.last_token and type(job.fingerprint) == 'string' and job.former and job.spans) then
    return nil, 'damaged'
  end
  return job
end

local function put_job(job)
  redis.call('HSET', JOBS, job.name, cjson.encode({
    text(FORMAT), text(job.last_token),
    job.pruned_to_ms and text(job.pruned_to_ms) or '',
    job.owed_from_ms and text(job.owed_from_ms) or '',
    job.fingerprint, job.former, job.spans,
  }))
  if not job.stored then
    redis.call('ZADD', NAMES, 0, job.name)
  end
end

-- -- what a record means at the store's clock ------------------------------------------------------

local function is_live(record)
  return record.state == 'running' and record.until_ms > now
end

local function is_lapsed(record)
  return record.state == 'running' and record.until_ms <= now
end

-- A wait longer than any retry delay shows that the clock was set back; it counts as over.
local function is_due(record)
  local left = record.until_ms - now
  return record.state == 'waiting' and (left <= 0 or left > MAX_RETRY_DELAY_MS)
end

local function is_overlong(record)
  return is_live(record) and record.until_ms - now > 2 * record.lease_ms
end
