"""What a job script of one's own says, and the experiment and the profile that follow from it.

`shell` reads bash into `statements` (`quoting`: their words), `expansion` fills in what is constant, as `pieces`.
`walk` and `commands` go through the statements as the job would, without running any, and keep the `state`.
`directives`, `launchers` and `megatron` read their lines; `adoption` makes keys of all that, and `writing` the files.
"""
