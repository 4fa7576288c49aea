-- confirm: a worker serves a version, or could not load it.
-- KEYS: weights updates workers stats config
-- ARGV: worker version error |
--   error: '' when the worker serves it now
-- REPLY: {current, last_good, state of the version, or '' if it is not known any more}
-- INVARIANT: the first worker that serves a version makes it good; it becomes bad only when
--   every live worker failed, or twice as many as live did: a failed load ends its worker, and
--   those started again under new names have never all failed. Then the level falls back to
--   the last good version. Field `failed` says who could not load it, and of the first 64 why.
local NAMED, REASON = 64, 500 -- workers whose reason is kept, and bytes of it
local version = whole(A.version, 'version')
local ttl = config('worker_ttl_ms')[1]
local v = text(version) .. ':'
local w = call('HMGET', K.weights, v .. 'state', v .. 'failed')
local state = w[1]
local current, good = level()
if not state then
  return {current, good, ''}
end
local failed = cjson.decode(w[2] or '{}')
local names = 0
for name in pairs(failed) do
  names = names + (name ~= A.worker and 1 or 0)
end

if A.error == '' then
  if failed[A.worker] then
    failed[A.worker] = nil
    call('HSET', K.weights, v .. 'failed', cjson.encode(failed))
  end
  if state == 'new' then
    state = 'good'
    call('HSET', K.weights, v .. 'state', state)
    if version > good then
      good = version
      call('HSET', K.weights, 'last_good', text(version))
    end
  end
  return {current, good, state}
end

local reason = string.sub(A.error, 1, REASON)
call('HSET', K.weights, v .. 'error', A.worker .. ': ' .. reason)
if state == 'new' or failed[A.worker] or names < NAMED then
  failed[A.worker] = names < NAMED and reason or ''
  call('HSET', K.weights, v .. 'failed', cjson.encode(failed))
end
if state == 'new' then
  local live, missing = 0, 0
  for _, name in ipairs(call('ZRANGEBYSCORE', K.workers, now() - ttl, '+inf')) do
    live = live + 1
    missing = missing + (failed[name] and 0 or 1)
  end
  if missing == 0 or names + 1 >= 2 * live then
    state = 'bad'
    call('HSET', K.weights, v .. 'state', state)
    count('versions_bad', 1)
    if version == current then
      current = good
      call('HSET', K.weights, 'current', text(good))
      call('XADD', K.updates, 'MAXLEN', '~', 1000, '*', 'version', text(good))
    end
  end
end
return {current, good, state}
