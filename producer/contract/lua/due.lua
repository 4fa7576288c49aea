-- due: closed groups that nobody is known to grade: their RQ jobs are to be enqueued, or looked for.
-- KEYS: group results grading stats config
-- ARGV: limit |
-- REPLY: {{group, digest, attempts begun, reward function, ms that an attempt may take}}
-- INVARIANT: a group waits for its grader until it is graded or its attempts are used up; who
--   got it here is given a lease time to enqueue its job, then somebody gets it again.
local limit = math.min(whole(A.limit, 'limit'), 256)
local c = config('lease_ms', 'grade_ms', 'max_grades')
local at = now()
local due = {}
for _, id in ipairs(call('ZRANGEBYSCORE', K.grading, '-inf', at, 'LIMIT', 0, limit)) do
  local g = call('HMGET', K.group .. id, 'digest', 'grades', 'reward')
  local attempts = tonumber(g[2] or 0)
  if not g[1] then
    call('ZREM', K.grading, id)
  elseif attempts >= c[3] then
    never_ended(id, attempts)
  else
    call('ZADD', K.grading, at + c[1], id)
    due[#due + 1] = {id, g[1], attempts, g[3], c[2]}
  end
end
return due
