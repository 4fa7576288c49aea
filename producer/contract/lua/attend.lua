-- attend: a trainer says that it is there, and how far it knows this Redis.
-- KEYS: trainers config
-- ARGV: consumer nonce place state |
--   nonce: random, names this client; place: where it runs, for people
--   state: the one in which it has restated its acks, '' if none
-- REPLY: {place of another client with this consumer's name, or '', state, age, behind}
--   state: names what Redis holds: another word after it was restarted, replaced or emptied
--   age: ms since a trainer first saw this state
--   behind: other trainers that have not restated their acks in it
-- INVARIANT: of two live trainers with one name each finds the other's mark again and again.
local FORGET_MS = 24 * 3600 * 1000
local c = call('HMGET', K.config, 'incarnation', 'state', 'state_at')
if not c[1] then
  error('NOQUEUE this queue is not set up', 0)
end
local run = string.match(call('INFO', 'server'), 'run_id:(%x+)') or ''
local history = string.match(call('INFO', 'replication'), 'master_replid:(%x+)') or ''
local at, state, since = now(), run .. history .. c[1], tonumber(c[3] or 0)
local knew_another = A.state ~= '' and A.state ~= state
if c[2] ~= state or since > at or (since == 0 and knew_another) then
  -- A new queue has nothing that it could have forgotten.
  since = (c[2] or knew_another) and at or 0
  call('HSET', K.config, 'state', state, 'state_at', text(since))
end

local other, behind = '', 0
local marks = call('HGETALL', K.trainers)
for i = 1, #marks, 2 do
  local nonce, when, known, place = string.match(marks[i + 1], '^(%S+) (%d+) (%S*) (.*)$')
  if marks[i] == A.consumer then
    other = nonce ~= A.nonce and place or ''
  elseif at - when > FORGET_MS then
    call('HDEL', K.trainers, marks[i])
  elseif known ~= state then
    behind = behind + 1
  end
end
call('HSET', K.trainers, A.consumer, table.concat({A.nonce, text(at), A.state, A.place}, ' '))
return {other, state, at - since, behind}
