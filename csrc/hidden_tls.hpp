// Thread-local variables of torch that have no accessor, found by name in the symbol tables.
//
// torch's shared libraries keep their local symbols, so the offset of such a variable inside its
// library's thread-local block can be read from the file, and __tls_get_addr (the ABI's own call)
// gives its address in the calling thread. A library whose table was stripped, or a torch that
// renamed the variable, yields nullptr: the caller then leaves that variable alone and says so.

#pragma once

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

namespace nnsight_pp {

struct HiddenVariable {
  const char* library;  // as the loader knows it
  const char* symbol;   // mangled
  std::size_t num_bytes;
  std::size_t module_id = 0;  // 0: not found
  std::size_t offset = 0;

  void* address() const {
    if (module_id == 0) return nullptr;
    struct {
      unsigned long module_id, offset;
    } index{module_id, offset};
    using GetAddress = void* (*)(void*);
    static const auto get_address =
        reinterpret_cast<GetAddress>(dlsym(RTLD_DEFAULT, "__tls_get_addr"));
    return get_address == nullptr ? nullptr : get_address(&index);
  }
};

// Look through one 64-bit ELF image for a thread-local symbol; true when offset and size fit.
inline bool find_in_image(const unsigned char* image, std::size_t num_bytes, HiddenVariable& out) {
  if (num_bytes < sizeof(Elf64_Ehdr) || std::memcmp(image, ELFMAG, SELFMAG) != 0 ||
      image[EI_CLASS] != ELFCLASS64) {
    return false;
  }
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
  if (header->e_shoff + header->e_shnum * sizeof(Elf64_Shdr) > num_bytes) return false;
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    const Elf64_Shdr& table = sections[i];
    if (table.sh_type != SHT_SYMTAB || table.sh_link >= header->e_shnum) continue;
    const Elf64_Shdr& strings = sections[table.sh_link];
    if (table.sh_offset + table.sh_size > num_bytes) return false;
    if (strings.sh_offset + strings.sh_size > num_bytes) return false;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(image + table.sh_offset);
    const auto* names = reinterpret_cast<const char*>(image + strings.sh_offset);
    const std::size_t num_symbols = table.sh_size / sizeof(Elf64_Sym);
    for (std::size_t s = 0; s < num_symbols; ++s) {
      const Elf64_Sym& symbol = symbols[s];
      if (ELF64_ST_TYPE(symbol.st_info) != STT_TLS || symbol.st_size != out.num_bytes) continue;
      if (std::strcmp(names + symbol.st_name, out.symbol) != 0) continue;
      out.offset = symbol.st_value;
      return true;
    }
  }
  return false;
}

// Fill in module_id and offset. Cost: one pass over a symbol table, about 10 ms for libtorch_cpu.
inline bool find_hidden(HiddenVariable& out) {
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
  void* handle = dlopen(out.library, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return false;
  link_map* map = nullptr;
  std::size_t module_id = 0;
  bool found = false;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 &&
      dlinfo(handle, RTLD_DI_TLS_MODID, &module_id) == 0 && module_id != 0) {
    const int file = open(map->l_name, O_RDONLY | O_CLOEXEC);
    struct stat status {};
    if (file >= 0 && fstat(file, &status) == 0 && status.st_size > 0) {
      const auto num_bytes = static_cast<std::size_t>(status.st_size);
      void* image = mmap(nullptr, num_bytes, PROT_READ, MAP_PRIVATE, file, 0);
      if (image != MAP_FAILED) {
        found = find_in_image(static_cast<const unsigned char*>(image), num_bytes, out);
        munmap(image, num_bytes);
      }
    }
    if (file >= 0) close(file);
  }
  dlclose(handle);  // NOLOAD took one reference; torch itself keeps the library
  if (found) out.module_id = module_id;
  return found;
#else
  static_cast<void>(out);
  return false;
#endif
}

}  // namespace nnsight_pp
