-- Tells what the user of this connection may not do, version 1. ARGV from 3: what EVALSHA is called
-- with, then names of commands. Returns the format of the store, empty where there is none, whether
-- the server could be asked, and the commands that are refused, each with the first such key.
local refused = {}
if not redis.acl_check_cmd then
  return {store_format or '', 0, refused}
end
if not redis.acl_check_cmd('EVALSHA', ARGV[3], '1', META) then
  refused[1] = 'EVALSHA'
end
if not redis.acl_check_cmd('EVAL', 'return 1', '1', META) then
  refused[#refused + 1] = 'EVAL'
end
for place = 4, #ARGV do
  for _, key in ipairs(KEYS) do
    if not redis.acl_check_cmd(ARGV[place], key, '0', '0', '0') then
      refused[#refused + 1] = ARGV[place] .. ' on ' .. key
      break
    end
  end
end
return {store_format or '', 1, refused}
