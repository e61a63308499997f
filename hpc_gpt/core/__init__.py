"""Code that trainer, reader and launcher share: settings of a run, its files, Slurm, and text and tables."""
