-- finish: a sample is complete; its last tokens may come along.
-- KEYS: ready leases sample chunks group results grading dead weights stats
-- ARGV: worker | id token tokens finish_reason stop_reason text offset count version chunk
--   count: of the tokens in `chunk`, 0 if all are checkpointed
-- REPLY: {current, last_good, {tokens stored an item, or -1: the lease is lost}}
--   fewer than `tokens`: not finished; send the missing ones and finish again
--   -1 also where its first token is too old and the sample starts again
-- INVARIANT: one terminal state a sample, given by the holder of its lease only.
for i = 1, ITEMS do
  local _, _, tokens, reason, _, _, offset, n, version, chunk = item(i)
  whole(tokens, 'tokens')
  if n ~= '0' then
    check_chunk(offset, n, version, chunk)
  end
  if reason ~= 'stop' and reason ~= 'length' then
    error('ROLLQ a sample finishes with stop or length, not ' .. reason, 0)
  end
end
local current, good = level()
local added = 0
local answers = {}
for i = 1, ITEMS do
  local id, token, tokens, reason, stop_reason, response, offset, n, version, chunk = item(i)
  local s = sample(id)
  if holds(s, token) then
    if n ~= '0' then
      added = added + append(s, offset, n, version, chunk)
    end
    answers[i] = s.tokens
    if s.tokens >= tonumber(tokens) then
      local verdict = judge_staleness(s, current, true)
      if verdict == 'restarted' then
        set(s, 'lease_token', '')
        make_ready(s)
        answers[i] = -1
      elseif verdict == 'fresh' then
        if stop_reason ~= '' then
          set(s, 'stop_reason', stop_reason)
        end
        if response ~= '' then
          set(s, 'text', response)
        end
        terminate(s, 'finished', reason, '', true)
      end
    end
  elseif repeated(s, token, 'finished') or repeated(s, token, 'stale') then
    answers[i] = tonumber(tokens)
  else
    answers[i] = -1
  end
end
count('tokens', added)
return {current, good, answers}
