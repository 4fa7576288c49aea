-- fail: a sample's own error, once and for all; or the death of the engine under it.
-- KEYS: ready leases sample group results grading dead weights stats config
-- ARGV: worker kind | id token error
--   kind: error ends the sample; crash counts as one and makes it ready again
-- REPLY: {current, last_good, {1, or -1: the lease is lost}}
-- INVARIANT: a sample's error is its own; a crash counts once.
local max_crashes = config('max_crashes')[1]
if A.kind ~= 'error' and A.kind ~= 'crash' then
  error('ROLLQ kind must be error or crash, not ' .. A.kind, 0)
end
local answers = {}
for i = 1, ITEMS do
  local id, token, err = item(i)
  local s = sample(id)
  answers[i] = 1
  if not holds(s, token) then
    answers[i] = A.kind == 'error' and repeated(s, token, 'failed') and 1 or -1
  elseif A.kind == 'crash' then
    crashed(s, max_crashes, err)
  else
    terminate(s, 'failed', 'error', err, true)
  end
end
local current, good = level()
return {current, good, answers}
