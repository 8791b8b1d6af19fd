-- Of every script that writes, after what all have in common, version 1.
--
-- A script that is refused a command half-way is not rolled back: one who may not do everything is
-- refused before anything is written.
for command, key in pairs({HSET = META, HSETNX = STORE, HDEL = RUNS, ZADD = TIMES, ZREM = TIMES}) do
  if redis.acl_check_cmd and not redis.acl_check_cmd(command, key, '0', '0') then
    return redis.error_reply('NOPERM no permission for ' .. command)
  end
end
