"""What a job script of one's own says, and the experiment and the profile that follow from it.

`shell` reads bash into statements, `expansion` fills in what is constant, `walk` goes through the statements as the job
would, without running any, `directives`, `launchers` and `megatron` read their lines, and `adoption` writes the result.
"""
