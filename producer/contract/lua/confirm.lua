-- confirm: a worker serves a version, or could not load it.
-- KEYS: weights updates workers stats config
-- ARGV: worker version error |
--   error: '' when the worker serves it now
-- REPLY: {current, last_good, state of the version, or '' if it is not known any more}
-- INVARIANT: the first worker that serves a version makes it good; it becomes bad only when
--   every live worker failed, or twice as many as live did: a failed load ends its worker, and
--   those started again under new names have never all failed. Then the level falls back to
--   the last good version.
local version = whole(A.version, 'version')
local ttl = config('worker_ttl_ms')[1]
local v = text(version) .. ':'
local state = call('HGET', K.weights, v .. 'state')
local current, good = level()
if state == 'new' and A.error == '' then
  state = 'good'
  call('HSET', K.weights, v .. 'state', state)
  if version > good then
    good = version
    call('HSET', K.weights, 'last_good', text(version))
  end
elseif state == 'new' then
  local failed = {}
  for name in string.gmatch(call('HGET', K.weights, v .. 'failed') or '', '[^,]+') do
    failed[name] = true
  end
  failed[A.worker] = true
  local names, live, missing = {}, 0, 0
  for name in pairs(failed) do
    names[#names + 1] = name
  end
  for _, name in ipairs(call('ZRANGEBYSCORE', K.workers, now() - ttl, '+inf')) do
    live = live + 1
    if not failed[name] then
      missing = missing + 1
    end
  end
  table.sort(names)
  call('HSET', K.weights, v .. 'failed', table.concat(names, ','), v .. 'error',
    A.worker .. ': ' .. A.error)
  if missing == 0 or #names >= 2 * live then
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
return {current, good, state or ''}
