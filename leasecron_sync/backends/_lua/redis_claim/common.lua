-- Of every script of a claim, format 1: what stands before the mechanism itself.
--
-- ARGV: 1 the clock that tests give, else empty; then job, scheduled_ms, due_ms, window_ms and
-- decision_id of each claim. KEYS: one for each claim,
-- see the mechanism; without claims, one that is looked at. A script fails before it
-- writes anything, or not at all: nothing is rolled back.
local now
if ARGV[1] == '' then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
else
  now = tonumber(ARGV[1])
end

local function text(number)
  return string.format('%.0f', number)
end

local function check_types(wanted)
  for _, key in ipairs(KEYS) do
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= wanted then
      return redis.error_reply('LEASECRON_TYPE ' .. key .. ' is a ' .. found)
    end
  end
end

-- For ten minutes at least: another instance may have a longer window than the winner.
local function matters_until(claim)
  return claim.due_ms + math.max(2 * claim.window_ms, 600000)
end

-- Returns verdict and wait_ms of each claim. The clock decides here, the mechanism who is first: win(key,
-- claim, is_old) returns whether this decision has the run, or nothing if nobody has it and it is too
-- old.
local function decide(win)
  local rows = {}
  for place = 1, (#ARGV - 1) / 5 do
    local at = 5 * place - 3
    local claim = {
      job = ARGV[at], ms = tonumber(ARGV[at + 1]), due_ms = tonumber(ARGV[at + 2]),
      window_ms = tonumber(ARGV[at + 3]), decision_id = ARGV[at + 4],
    }
    local verdict, wait_ms = 'early', claim.due_ms - now
    if wait_ms <= 0 then
      local won = win(KEYS[place], claim, now - claim.due_ms > claim.window_ms)
      if won == nil then
        verdict = 'too_old'
      else
        verdict = won and 'granted' or 'taken'
      end
    end
    rows[place] = {verdict, math.max(0, wait_ms)}
  end
  return rows
end
