-- prompt: settle the token ids of a prompt that came as text, once a group.
-- KEYS: sample group
-- ARGV: | id token tokens prompt_ids
-- REPLY: an answer an item: the ids that count (the first that were written), or '' if lost
-- INVARIANT: every attempt of every member of a group gets the same prompt ids.
for i = 1, ITEMS do
  local _, _, tokens, prompt_ids = item(i)
  if whole(tokens, 'tokens') < 1 or #prompt_ids ~= 4 * tokens then
    error('ROLLQ a prompt of ' .. tokens .. ' tokens has 4 bytes for each, not ' .. #prompt_ids, 0)
  end
end
local answers = {}
for i = 1, ITEMS do
  local id, token, tokens, prompt_ids = item(i)
  local s = sample(id)
  answers[i] = ''
  if holds(s, token) then
    local there = call('HGET', K.group .. s.group, 'prompt_ids')
    if there == '' then
      call('HSET', K.group .. s.group, 'prompt_ids', prompt_ids, 'prompt_tokens', tokens)
      there = prompt_ids
    end
    answers[i] = there
  end
end
return answers
