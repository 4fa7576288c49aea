-- restate: a trainer says again what it has taken, for Redis may have come back from before its acks.
-- KEYS: ready leases sample chunks group results done dead stats config
-- ARGV: group consumer acked | id digest
--   acked: 1 if an ack was answered; 0 if it has them in hand, and no ack found them as it knew them
-- REPLY: {state, age, {an item: 1 if it is this consumer's, 0 if somebody else has it}}
--   state: names what Redis holds: another word after it was restarted, replaced or emptied
--   age: ms since the first trainer saw this state
-- INVARIANT: what was taken once is not made or delivered again, in whatever stage it came back.
--   Its unread entry stays in the stream (deleting it would spoil the group's `lag`): readers
--   ack an entry whose group is gone.
if A.acked ~= '0' and A.acked ~= '1' then
  error('ROLLQ acked must be 0 or 1, not ' .. A.acked, 0)
end
local tombstone_ms = config('tombstone_ms')[1]

local function look()
  local run = string.match(call('INFO', 'server'), 'run_id:(%x+)') or ''
  local history = string.match(call('INFO', 'replication'), 'master_replid:(%x+)') or ''
  local c = call('HMGET', K.config, 'incarnation', 'state', 'state_at')
  local state, at = run .. history .. c[1], now()
  if c[2] ~= state or tonumber(c[3]) > at then
    c[3] = c[2] and text(at) or 0 -- a new queue has nothing that it could have forgotten
    call('HSET', K.config, 'state', state, 'state_at', c[3])
  end
  return state, at - c[3]
end

local function restate(id, digest)
  local taken = call('GET', K.done .. id)
  if taken then
    return taker(taken) == A.consumer and 1 or 0
  end
  local g = call('HMGET', K.group .. id, 'digest', 'size', 'job', 'prompt_ids', 'ended', 'entry')
  if not g[1] then
    call('SET', K.done .. id, digest .. ' ' .. A.consumer, 'PX', tombstone_ms)
    return 1
  end
  local pending = g[6] and call('XPENDING', K.results, A.group, g[6], g[6], 1)[1]
  if g[1] ~= digest or (pending and pending[2] ~= A.consumer and A.acked == '0') then
    return 0
  end
  if pending then
    call('XACK', K.results, A.group, g[6])
    call('XDEL', K.results, g[6])
  end
  local open = 0
  for index = 0, g[2] - 1 do
    local sid = id .. '/' .. index
    open = open + call('ZREM', K.ready, sid) + call('ZREM', K.leases, sid)
  end
  count('restated', open)
  count('groups_closed', g[6] and 0 or 1)
  take(id, g, A.consumer, tombstone_ms)
  return 1
end

local answers = {}
for i = 1, ITEMS do
  answers[i] = restate(item(i))
end
local state, age = look()
return {state, age, answers}
