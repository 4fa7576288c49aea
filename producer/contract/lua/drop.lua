-- drop: forget dead-lettered samples.
-- KEYS: sample chunks group dead stats
-- ARGV: | id group
-- REPLY: an item: 1 if it was there
-- INVARIANT: a sample whose group is not acked yet is still delivered.
local answers = {}
for i = 1, ITEMS do
  local id, group = item(i)
  answers[i] = call('ZREM', K.dead, id)
  if answers[i] == 1 and call('EXISTS', K.group .. group) == 0 then
    call('UNLINK', K.sample .. id, K.chunks .. id)
  end
  count('dropped', answers[i])
end
return answers
