-- configure: set up a queue, or change its limits; every process calls it when it connects.
-- KEYS: config results
-- ARGV: schema incarnation group | field value force
-- REPLY: the whole config hash
-- INVARIANT: what is set stays, unless `force` is 1; the consumer group sees every result.
local schema = call('HGET', K.config, 'schema')
if schema and schema ~= A.schema then
  error('ROLLQ this queue has schema ' .. schema .. ', this program speaks ' .. A.schema, 0)
end
for i = 1, ITEMS do
  local field, value = item(i)
  if whole(value, field) < 1 then
    error('ROLLQ ' .. field .. ' must be 1 or more, not ' .. value, 0)
  end
end
for i = 1, ITEMS do
  local field, value, force = item(i)
  if force == '1' or redis.call('HEXISTS', K.config, field) == 0 then
    call('HSET', K.config, field, value)
  end
end
call('HSETNX', K.config, 'schema', A.schema)
call('HSETNX', K.config, 'incarnation', A.incarnation)
local made = redis.pcall('XGROUP', 'CREATE', K.results, A.group, '0', 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
  return made
end
return call('HGETALL', K.config)
