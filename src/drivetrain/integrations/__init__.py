"""Classes for programs that run inside another library, such as Ray Train. Each library has one file."""
