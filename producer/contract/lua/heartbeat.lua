-- heartbeat: a worker says that it lives, and what it does.
-- KEYS: workers worker weights config
-- ARGV: worker | field value
-- REPLY: {current, last_good}
-- INVARIANT: a worker that stopped is off the list within its time to live.
local ttl = config('worker_ttl_ms')[1]
local at = now()
local fields = {'heartbeat_at', text(at)}
for i = 1, ITEMS do
  fields[#fields + 1], fields[#fields + 2] = item(i)
end
call('HSET', K.worker .. A.worker, unpack(fields))
call('PEXPIRE', K.worker .. A.worker, ttl)
call('ZADD', K.workers, at, A.worker)
call('ZREMRANGEBYSCORE', K.workers, '-inf', '(' .. text(at - ttl))
return {level()}
