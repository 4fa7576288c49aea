-- publish: a new weight version: allocate it, set the level, tell the stream.
-- KEYS: weights updates workers worker stats
-- ARGV: request digest path step policy deadline_ms max_updating force floor |
--   request: random, names this call; floor: the highest version its caller ever saw
--   max_updating: how many workers may load it at once, `2` or, of those that live, `50%`
--   force: 1 makes a new version of the files that are current already
-- REPLY: {version, 1 if this call made it}
-- INVARIANT: versions only grow, also past those that workers serve and a Redis that lost its
--   last second does not know any more; the same call, and the same files again, change nothing.
local floor = whole(A.floor, 'floor')
whole(A.step, 'step')
whole(A.deadline_ms, 'deadline_ms')
if A.policy ~= 'requeue' and A.policy ~= 'keep' and A.policy ~= 'finish' then
  error('ROLLQ policy must be requeue, keep or finish, not ' .. A.policy, 0)
end
if not string.find(A.max_updating, '^[1-9]%d*$') and not string.find(A.max_updating, '^[%d.]+%%$') then
  error('ROLLQ max_updating must be a number or a percentage, not ' .. A.max_updating, 0)
end
local current, good = level()
local newest = tonumber(call('HGET', K.weights, 'newest') or 0)
local KEPT = 16
for v = math.max(1, newest - KEPT), newest do
  if call('HGET', K.weights, v .. ':request') == A.request then
    return {v, 1}
  end
end
if A.force ~= '1' and current > 0
    and call('HGET', K.weights, text(current) .. ':digest') == A.digest then
  return {current, 0}
end
for _, name in ipairs(call('ZRANGE', K.workers, 0, -1)) do
  floor = math.max(floor, tonumber(call('HGET', K.worker .. name, 'version') or 0))
end
local version = math.max(newest, floor) + 1
local v = text(version) .. ':'
call('HSET', K.weights, 'newest', text(version), 'current', text(version), v .. 'state', 'new',
  v .. 'digest', A.digest, v .. 'path', A.path, v .. 'step', A.step, v .. 'policy', A.policy,
  v .. 'deadline_ms', A.deadline_ms, v .. 'max_updating', A.max_updating, v .. 'request', A.request, v .. 'published_at', text(now()))
for old = math.max(1, newest - 2 * KEPT), math.min(newest, version - KEPT) do
  if old ~= good then
    for _, field in ipairs({'state', 'digest', 'path', 'step', 'policy', 'deadline_ms',
      'max_updating', 'request', 'published_at', 'error', 'failed'}) do
      call('HDEL', K.weights, text(old) .. ':' .. field)
    end
  end
end
call('XADD', K.updates, 'MAXLEN', '~', 1000, '*', 'version', text(version))
count('published', 1)
return {version, 1}
