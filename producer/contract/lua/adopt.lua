-- adopt: hand a trainer what another one took and did not ack.
-- KEYS: results trainers
-- ARGV: group from consumer idle_ms limit |
--   idle_ms: not if `from` read within so many ms; 0 takes it from a live one, too
-- REPLY: {entries handed over, ms since `from` last read, or -1 where nobody has that name}
-- INVARIANT: an entry has one owner; a live consumer keeps its own; nobody waits for a gone one.
local idle_ms = whole(A.idle_ms, 'idle_ms')
local limit = math.min(whole(A.limit, 'limit'), 256)
local idle = -1
for _, consumer in ipairs(call('XINFO', 'CONSUMERS', K.results, A.group)) do
  local facts = {}
  for i = 1, #consumer, 2 do
    facts[consumer[i]] = consumer[i + 1]
  end
  if facts.name == A.from then
    idle = facts.idle
  end
end
if idle < idle_ms then
  return {0, idle}
end
call('HDEL', K.trainers, A.from)
local ids = {}
for i, entry in ipairs(call('XPENDING', K.results, A.group, '-', '+', limit, A.from)) do
  ids[i] = entry[1]
end
if #ids > 0 then
  ids[#ids + 1] = 'JUSTID'
  call('XCLAIM', K.results, A.group, A.consumer, 0, unpack(ids))
end
return {math.max(0, #ids - 1), idle}
