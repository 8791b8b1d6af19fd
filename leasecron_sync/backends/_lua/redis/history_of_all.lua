-- Returns member and record of the newest runs of all jobs, version 1. ARGV from 3: the limit.
--
-- More than that many may come, in any order: all unsettled ones, and all of the last time.
local rows = {}
local function add(m)
  rows[#rows + 1] = {m, redis.call('HGET', RUNS, m) or ''}
end
for _, m in ipairs(redis.call('ZRANGE', OPEN, 0, -1)) do
  add(m)
end
local count = tonumber(ARGV[3])
if count > 0 then
  local last = redis.call('ZREVRANGE', SETTLED, count - 1, count - 1, 'WITHSCORES')[2] or '-inf'
  for _, m in ipairs(redis.call('ZREVRANGEBYSCORE', SETTLED, '+inf', last)) do
    add(m)
  end
end
return rows
