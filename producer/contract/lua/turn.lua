-- turn: a worker asks for its turn to stop generating and load weights, or gives it back.
-- KEYS: turns line turn workers starting weights config
-- ARGV: worker serves hold_ms waits |
--   serves: the version that it serves until then
--   hold_ms: the longest that it needs; 0 gives the turn, or the place in the line, back
--   waits: 0 if nobody would miss it, for it generates nothing: it has its turn in any case
-- REPLY: {current, last_good, 1 if it has its turn now}
-- INVARIANT: of the workers that live no more have their turn than the current version's
--   `max_updating` allows, but for those that do not wait, and always one may. The oldest weights
--   go first, then who asked first. A turn ends when it is given back, its worker is off the list,
--   or its time is over by Redis TIME.
-- A free turn goes to the next in the line at once, who is told by its stream `turn` and must ask
-- again to have it for longer than a heartbeat lives. So each call costs the same in any pool.
local serving = whole(A.serves, 'serves')
local hold = whole(A.hold_ms, 'hold_ms')
local waits = whole(A.waits, 'waits')
local ttl = config('worker_ttl_ms')[1]
local at = now()
local current, good = level()

bury(at - ttl)
call('ZREMRANGEBYSCORE', K.turns, '-inf', text(at))
-- Whoever is not on the list, since Redis lost it, could die unseen.
hold = call('ZSCORE', K.workers, A.worker) and hold or math.min(hold, ttl)
if hold <= 0 then
  call('ZREM', K.turns, A.worker)
  call('ZREM', K.line, A.worker)
elseif waits == 0 or call('ZSCORE', K.turns, A.worker) then
  call('ZADD', K.turns, text(at + hold), A.worker)
  call('ZREM', K.line, A.worker)
else
  -- Older weights, then who asked first; nobody waits for the 24 days after which 2^31 ms begin anew.
  call('ZADD', K.line, 'NX', text(serving * 2 ^ 31 + at % 2 ^ 31), A.worker)
end

local most = call('HGET', K.weights, text(current) .. ':max_updating') or '50%'
local share = string.match(most, '^(.+)%%$')
if share then
  local working = call('ZCARD', K.workers) - call('ZCARD', K.starting)
  most = math.floor(working * tonumber(share) / 100 + 1e-6)
end
local free = math.max(1, tonumber(most)) - call('ZCARD', K.turns)
while free > 0 do
  local name = call('ZRANGE', K.line, 0, 0)[1]
  if not name then
    break
  end
  call('ZREM', K.line, name)
  if name == A.worker then
    call('ZADD', K.turns, text(at + hold), name)
    free = free - 1
  elseif call('ZSCORE', K.workers, name) then
    call('ZADD', K.turns, text(at + ttl), name)
    call('XADD', K.turn .. name, 'MAXLEN', 1, '*', 'turn', 'yours')
    call('PEXPIRE', K.turn .. name, ttl)
    free = free - 1
  end
end
return {current, good, call('ZSCORE', K.turns, A.worker) and 1 or 0}
