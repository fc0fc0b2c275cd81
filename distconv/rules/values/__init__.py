"""What leaves torch: the numbers, text and files of a distributed tensor are those of the whole one."""
