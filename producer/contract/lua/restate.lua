-- restate: a trainer says again what it has taken, for Redis may have come back from before its acks.
-- KEYS: ready leases sample chunks group results grading done dead stats config
-- ARGV: group consumer acked | id digest
--   acked: 1 if an ack was answered; 0 if it has them in hand, and no ack found them as it knew them
-- REPLY: an item: 1 if it is this consumer's, 0 if somebody else has it
-- INVARIANT: what was taken once is not made or delivered again, in whatever stage it came back.
--   Its unread entry stays in the stream (deleting it would spoil the group's `lag`): readers
--   ack an entry whose group is gone.
if A.acked ~= '0' and A.acked ~= '1' then
  error('ROLLQ acked must be 0 or 1, not ' .. A.acked, 0)
end
local tombstone_ms = config('tombstone_ms')[1]

local function restate(id, digest)
  local taken = call('GET', K.done .. id)
  if taken then
    return taker(taken) == A.consumer and 1 or 0
  end
  local g = call('HMGET', K.group .. id, 'digest', 'size', 'entry')
  if not g[1] then
    count('acks_restated', 1)
    call('SET', K.done .. id, digest .. ' ' .. A.consumer, 'PX', tombstone_ms)
    return 1
  end
  local pending = g[3] and call('XPENDING', K.results, A.group, g[3], g[3], 1)[1]
  if g[1] ~= digest or (pending and pending[2] ~= A.consumer and A.acked == '0') then
    return 0
  end
  if pending then
    call('XACK', K.results, A.group, g[3])
    call('XDEL', K.results, g[3])
  end
  local open = 0
  for index = 0, g[2] - 1 do
    local sid = id .. '/' .. index
    open = open + call('ZREM', K.ready, sid) + call('ZREM', K.leases, sid)
  end
  call('ZREM', K.grading, id)
  count('acks_restated', 1)
  count('restated', open)
  count('groups_closed', g[3] and 0 or 1)
  take(id, digest, g[2], A.consumer, tombstone_ms)
  return 1
end

local answers = {}
for i = 1, ITEMS do
  answers[i] = restate(item(i))
end
return answers
