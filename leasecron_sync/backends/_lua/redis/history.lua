-- Returns member and record of a job's newest runs, version 1. ARGV from 3: the limit, the job.
local of_job = prefix(ARGV[4])
local rows = {}
for _, m in ipairs(redis.call(
  'ZREVRANGEBYLEX', TIMES, '(' .. of_job .. ':', '[' .. of_job, 'LIMIT', 0, ARGV[3]
)) do
  rows[#rows + 1] = {m, redis.call('HGET', RUNS, m) or ''}
end
return rows
