-- graded: a grader says the rewards of a group, or why there are none.
-- KEYS: group results grading stats config
-- ARGV: group digest attempt request rewards error final |
--   request: with which `grade` began the attempt
--   rewards: msgpack, a number or map a member, or '' with an error
--   final: 1 when another attempt would end the same way
-- REPLY: 1 the group is delivered, 0 another attempt follows, -1 it does not wait for this one
-- INVARIANT: a group gets its rewards once; only the newest attempt may fail it; none that began
--   with what Redis does not hold any more.
local attempt = whole(A.attempt, 'attempt')
if (A.rewards == '') == (A.error == '') then
  error('ROLLQ a group is graded with rewards or with an error, not with both', 0)
end
if #A.rewards > 4194304 then
  error('ROLLQ the rewards of a group have at most 4 MiB, these ' .. #A.rewards, 0)
end
local max_grades = config('max_grades')[1]
local g = call('HMGET', K.group .. A.group, 'digest', 'grades', 'graded', 'grader:' .. text(attempt))
if g[1] ~= A.digest or g[4] ~= A.request then
  return -1
end
if not call('ZSCORE', K.grading, A.group) then
  return g[3] == text(attempt) and 1 or -1
end
local newest = attempt == tonumber(g[2] or 0)
if A.rewards ~= '' then
  call('HSET', K.group .. A.group, 'rewards', A.rewards, 'graded', text(attempt))
  call('HDEL', K.group .. A.group, 'reward_error')
  count('groups_graded', 1)
  deliver(A.group)
  return 1
elseif not newest then
  return -1
elseif A.final == '1' or attempt >= max_grades then
  call('HSET', K.group .. A.group, 'graded', text(attempt))
  grading_failed(A.group, A.error)
  return 1
end
call('HSET', K.group .. A.group, 'reward_error', A.error)
call('ZADD', K.grading, now(), A.group)
return 0
