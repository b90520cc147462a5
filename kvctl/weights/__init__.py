"""Making weights smaller: formats, searches and the checkpoints that hold what comes out."""
