-- grade: a grader begins with a group.
-- KEYS: group results grading stats config
-- ARGV: group digest request |
--   request: random, names this call
-- REPLY: {attempt, size, reward function, ms that it may take}; attempt 0: not to be graded (any more)
-- INVARIANT: an attempt counts when it begins, so that one that kills its process counts, too.
local c = config('grade_ms', 'max_grades')
local g = call('HMGET', K.group .. A.group, 'digest', 'grades', 'graded_by', 'size', 'reward')
local attempts = tonumber(g[2] or 0)
if g[1] ~= A.digest or not call('ZSCORE', K.grading, A.group) then
  return {0, 0, '', c[1]}
end
if g[3] ~= A.request then
  if attempts >= c[2] then
    never_ended(A.group, attempts)
    return {0, 0, '', c[1]}
  end
  attempts = attempts + 1
  call('HSET', K.group .. A.group, 'grades', attempts, 'graded_by', A.request,
    'grader:' .. text(attempts), A.request)
  -- Behind RQ's own limit, with time for what comes before and after the function itself.
  call('ZADD', K.grading, text(now() + 1.5 * c[1] + 2000), A.group)
end
return {attempts, tonumber(g[4]), g[5], c[1]}
