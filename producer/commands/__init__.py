"""The commands of `rollq`: one module a command, and what they share.

What each of them guarantees: what a program reads is on stdout, everything else on stderr; a
user's mistake ends as one line without a traceback; the exit codes are those of `producer.cli`.
What is heavy (redis, rich, pyarrow) is imported by the command that needs it, when it runs.
"""
