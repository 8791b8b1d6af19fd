-- Returns the jobs by name, version 1. ARGV from 3: the limit. For each: name, record, how many of its
-- runs are unsettled, and member and record of its newest run, empty where there is none.
local rows = {}
for _, name in ipairs(redis.call('ZRANGEBYLEX', NAMES, '-', '+', 'LIMIT', 0, ARGV[3])) do
  local of_job = prefix(name)
  local first, last = '[' .. of_job, '(' .. of_job .. ':'
  local newest = redis.call('ZREVRANGEBYLEX', TIMES, last, first, 'LIMIT', 0, 1)[1]
  rows[#rows + 1] = {
    name, redis.call('HGET', JOBS, name) or '', redis.call('ZLEXCOUNT', OPEN, first, last),
    newest or '', newest and redis.call('HGET', RUNS, newest) or '',
  }
end
return rows
