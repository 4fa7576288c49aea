-- heartbeat: a worker says that it lives, and what it does.
-- KEYS: workers starting worker turns line weights config
-- ARGV: worker | field value
--   the field `nonce` is random and names the process
-- REPLY: {current, last_good, `host:pid` of another process whose nonce was there, or ''}
-- INVARIANT: a worker that stopped is off the list within its time to live; one that serves is
--   not said to be starting by a heartbeat that was on its way; one that starts has no turn.
local ttl = config('worker_ttl_ms')[1]
local at = now()
local before = call('HMGET', K.worker .. A.worker, 'nonce', 'host', 'pid', 'state')
local said = {heartbeat_at = text(at)}
for i = 1, ITEMS do
  local field, value = item(i)
  said[field] = value
end
local other = ''
if said.nonce and before[1] and before[1] ~= said.nonce then
  other = (before[2] or '?') .. ':' .. (before[3] or '?')
  if said.state == 'starting' then
    strike(A.worker) -- one of its name, which died
  end
elseif said.nonce and said.state == 'starting' and before[4] then
  said.state = before[4] -- that it serves is said at once, and maybe before its first heartbeat
end
local fields = {}
for field, value in pairs(said) do
  fields[#fields + 1], fields[#fields + 2] = field, value
end
call('HSET', K.worker .. A.worker, unpack(fields))
call('PEXPIRE', K.worker .. A.worker, ttl)
call('ZADD', K.workers, at, A.worker)
if said.state == 'starting' then
  call('ZADD', K.starting, at, A.worker)
elseif said.state then
  call('ZREM', K.starting, A.worker)
end
bury(at - ttl)
local current, good = level()
return {current, good, other}
