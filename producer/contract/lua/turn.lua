-- turn: a worker asks for its turn to stop generating and load a version, or gives it back.
-- KEYS: turns workers worker weights updates config
-- ARGV: worker version serves hold_ms waits |
--   version: what it wants to load; serves: what it serves until then
--   hold_ms: the longest that it needs; 0 gives the turn, or the place in the line, back
--   waits: 0 if nobody would miss it, for it generates nothing: it has its turn in any case
-- REPLY: {current, last_good, 1 if it has its turn now}
-- INVARIANT: of the workers that live no more have their turn than the version's `max_updating`
--   allows, but for those that do not wait, and always one may. The oldest weights go first,
--   then who asked first. A turn ends when it is given back, its worker is off the list, or its
--   time is over by Redis TIME; a place in the line also when its worker asks no more.
-- A turn is `until serves asked seen`, in ms; `until` is 0 while its worker waits in the line.
local version = whole(A.version, 'version')
local serving = whole(A.serves, 'serves')
local hold = whole(A.hold_ms, 'hold_ms')
local waits = whole(A.waits, 'waits')
local ttl = config('worker_ttl_ms')[1]
local at = now()
local current, good = level()

-- one that starts generates nothing yet, and may have the name of one that died
local live, working = {[A.worker] = true}, 0
for _, name in ipairs(call('ZRANGEBYSCORE', K.workers, at - ttl, '+inf')) do
  if call('HGET', K.worker .. name, 'state') ~= 'starting' then
    live[name] = true
    working = working + 1
  end
end

local turns, waiting = {}, 0
local flat = call('HGETALL', K.turns)
for i = 1, #flat, 2 do
  local over, serves, asked, seen = string.match(flat[i + 1], '^(%d+) (%d+) (%d+) (%d+)$')
  local turn = {name = flat[i], over = tonumber(over), serves = tonumber(serves),
    asked = tonumber(asked)}
  local gone = not live[turn.name]
  if turn.over > 0 then
    gone = gone or turn.over <= at
  else
    gone = gone or tonumber(seen) < at - ttl
  end
  if gone then
    call('HDEL', K.turns, turn.name)
  else
    turns[turn.name] = turn
    waiting = waiting + (turn.over == 0 and turn.name ~= A.worker and 1 or 0)
  end
end

local mine = turns[A.worker]
if hold <= 0 then
  if mine then
    call('HDEL', K.turns, A.worker)
    if waiting > 0 then
      call('XADD', K.updates, 'MAXLEN', '~', 1000, '*', 'turn', 'free')
    end
  end
  return {current, good, 0}
end

local most = call('HGET', K.weights, text(version) .. ':max_updating') or '50%'
local share = string.match(most, '^(.+)%%$')
most = share and math.floor(working * tonumber(share) / 100 + 1e-6) or tonumber(most)
local asked = mine and mine.asked or at
local before = 0 -- those that have their turn, or get theirs first
for _, turn in pairs(turns) do
  local older = turn.serves < serving or (turn.serves == serving
    and (turn.asked < asked or (turn.asked == asked and turn.name < A.worker)))
  if turn.name ~= A.worker and (turn.over > 0 or older) then
    before = before + 1
  end
end
local granted = waits == 0 or (mine and mine.over > 0) or before < math.max(1, most)
call('HSET', K.turns, A.worker, text(granted and at + hold or 0) .. ' ' .. text(serving) .. ' '
  .. text(asked) .. ' ' .. text(at))
return {current, good, granted and 1 or 0}
