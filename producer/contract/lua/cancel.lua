-- cancel: end samples that are not wanted any more, wherever they are.
-- KEYS: ready leases sample group results grading dead stats
-- ARGV: reason | group index
--   index: '' for every member of the group
-- REPLY: an item: how many were cancelled
-- INVARIANT: the holder's next write is refused; tokens made so far are delivered.
local function cancel(group, index)
  local s = sample(group .. '/' .. index)
  if s and (s.state == 'ready' or s.state == 'leased') then
    -- Also where it is leased: at maxmemory Redis refuses what may grow, unless the script has
    -- written before, and to cancel is a way to have room again.
    call('ZREM', K.ready, s.id)
    terminate(s, 'cancelled', 'cancelled', A.reason)
    return 1
  end
  return 0
end
local answers = {}
for i = 1, ITEMS do
  local group, index = item(i)
  answers[i] = 0
  if index ~= '' then
    answers[i] = cancel(group, index)
  else
    local size = tonumber(call('HGET', K.group .. group, 'size') or 0)
    for member = 0, size - 1 do
      answers[i] = answers[i] + cancel(group, member)
    end
  end
end
return answers
