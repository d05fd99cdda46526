// The extension module `picaflor._native`: gathers what the folders bind.
#include <nanobind/nanobind.h>

namespace picaflor {
void bind_kernels(nanobind::module_& module);  // native/cpu/bind_kernels.cpp
void bind_program(nanobind::module_& module);  // native/cpu/bind_program.cpp
void bind_io(nanobind::module_& module);       // native/io/bind_io.cpp
}  // namespace picaflor

NB_MODULE(_native, module) {
  module.doc() = "Kernels, programs and file reads of Picaflor.";
  picaflor::bind_kernels(module);
  picaflor::bind_program(module);
  picaflor::bind_io(module);
}
