-- release: hand samples back unfinished, on purpose; never counts as a crash.
-- KEYS: ready leases sample weights stats
-- ARGV: worker reason | id token tokens
--   tokens: how many the worker has checkpointed; a sample with fewer stored stays leased
-- REPLY: {current, last_good, {tokens stored an item, or -1: the lease is lost}}
-- INVARIANT: what was made is there before the sample is ready again.
for i = 1, ITEMS do
  local _, _, tokens = item(i)
  whole(tokens, 'tokens')
end
local answers = {}
local released = 0
for i = 1, ITEMS do
  local id, token, tokens = item(i)
  local s = sample(id)
  if holds(s, token) then
    if s.tokens >= tonumber(tokens) then
      set_number(s, 'interruptions', s.interruptions + 1)
      make_ready(s)
      released = released + 1
    end
    answers[i] = s.tokens
  elseif repeated(s, token, 'ready') then
    answers[i] = s.tokens
  else
    answers[i] = -1
  end
end
count('interrupted', released)
count('interrupted_' .. A.reason, released)
local current, good = level()
return {current, good, answers}
