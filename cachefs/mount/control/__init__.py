"""The control directory `.cachefs` of a mount: programs publish, and call the daemon, by writing lines into its file.

`control_directory` is what the mount shows, `calls` decodes lines and collects requests that come in parts, and
`line_reader` reads the FIFO behind the file and answers.
"""
