-- ack: the trainer has taken closed groups; the only script that deletes results.
-- KEYS: sample chunks group results done dead stats config
-- ARGV: group consumer | entry id
-- REPLY: an item: 1 taken by this call (or by this consumer before), 0 if somebody else has it
-- INVARIANT: a closed group is taken once; a dead sample stays to be looked at.
local tombstone_ms = config('tombstone_ms')[1]
local pending = {}
for i = 1, ITEMS do
  local entry, id = item(i)
  pending[i] = call('XPENDING', K.results, A.group, entry, entry, 1)[1] or false
  local there = call('XRANGE', K.results, entry, entry)[1]
  if there and there[2][2] ~= id then
    error('ROLLQ entry ' .. entry .. ' is of group ' .. there[2][2] .. ', not ' .. id, 0)
  end
end

local entries = {}
local function ack(entry, id, pending)
  if pending and pending[2] ~= A.consumer then
    return 0
  end
  if pending then
    entries[#entries + 1] = entry
  end
  local g = pending and call('HMGET', K.group .. id, 'digest', 'size')
  if g and g[1] then
    take(id, g[1], g[2], A.consumer, tombstone_ms)
    return 1
  end
  local taken = call('GET', K.done .. id)
  return taken and taker(taken) == A.consumer and 1 or 0
end
local answers = {}
for i = 1, ITEMS do
  local entry, id = item(i)
  answers[i] = ack(entry, id, pending[i])
end
in_pieces(entries, function(...)
  call('XACK', K.results, A.group, ...)
  call('XDEL', K.results, ...)
end)
return answers
