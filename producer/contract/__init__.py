"""The wire contract: all that producer and workers share.

| module | what |
|---|---|
| keys | names of the keys |
| states | states of a sample, reasons, policies |
| sampling | SamplingParams, the allow-list |
| messages | Job, Claim, Chunk, Rollout |
| codec | their bytes |
| scripts, lua/ | one script an operation |
| connection | running the scripts over Redis |
| errors | the tree of errors |
"""
