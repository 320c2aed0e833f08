// An accelerator for tests, as torch's PrivateUse1 backend. It computes with the CPU's kernels, so results have the CPU's
// bits, but host code cannot treat its memory or its time as the host's:
// - Device memory is unreadable (PROT_NONE) except while one of the device's own operations runs.
// - A copy with non_blocking=True between pinned and device memory is put off: one to the host until the host
//   synchronises with its stream or an event behind it, one to the device until its stream needs it.
// - Operations that make the host wait for the device are counted, as are kernels and copies between host and device,
//   by the thread that called them.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

// Of Python, whose headers are not needed for more.
extern "C" int PyGILState_Check();
extern "C" void* PyEval_SaveThread();
extern "C" void PyEval_RestoreThread(void*);

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;

std::recursive_mutex mutex;  // held by every operation: the device does one thing at a time

// Holds the mutex. Its holder may need Python's lock (to refer to a tensor that Python holds), so no thread waits for
// the mutex with that.
class Lock {
 public:
  explicit Lock(std::recursive_mutex&) {
    if (mutex.try_lock()) return;
    void* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex.lock();
    if (state != nullptr) PyEval_RestoreThread(state);
  }
  Lock(const Lock&) = delete;
  ~Lock() { mutex.unlock(); }
};

enum Counter { KERNELS, SYNCHRONISATIONS, TO_HOST, TO_DEVICE, COUNTERS };
thread_local long counters[COUNTERS] = {};

// Memory

struct Block {
  size_t nbytes;
  Device device;
  int users = 0;  // operations that have made it readable
};
std::mutex memory_mutex;  // of these maps; tensors are freed while another thread's operation runs
std::map<uintptr_t, Block> blocks;          // of device memory, by address
std::map<uintptr_t, size_t> pinned_blocks;  // of the host
using MemoryLock = std::lock_guard<std::mutex>;

size_t page_rounded(size_t nbytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  return (std::max<size_t>(nbytes, 1) + page - 1) / page * page;
}

void* map_pages(size_t nbytes, int protection) {
  void* address = mmap(nullptr, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "the fake device is out of memory");
  return address;
}

template <typename Map>
auto find_block(Map& map, const void* pointer) {
  auto it = map.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  return it == map.begin() ? map.end() : std::prev(it);
}

// Makes the memory of device tensors readable while it lives.
class Access {
 public:
  Access() = default;
  Access(const Access&) = delete;
  ~Access() {
    MemoryLock lock(memory_mutex);
    for (auto address : opened_) {
      auto& block = blocks.at(address);
      if (--block.users == 0) mprotect(reinterpret_cast<void*>(address), block.nbytes, PROT_NONE);
    }
  }
  void open(const void* pointer) {
    if (pointer == nullptr) return;
    MemoryLock lock(memory_mutex);
    auto it = find_block(blocks, pointer);
    TORCH_CHECK(it != blocks.end(), "a tensor of the fake device has memory that is not the device's");
    if (it->second.users++ == 0) {
      mprotect(reinterpret_cast<void*>(it->first), it->second.nbytes, PROT_READ | PROT_WRITE);
    }
    opened_.push_back(it->first);
  }

 private:
  std::vector<uintptr_t> opened_;
};

thread_local DeviceIndex current_device = 0;

void free_device(void* pointer) {
  if (pointer == nullptr) return;
  MemoryLock lock(memory_mutex);
  auto it = blocks.find(reinterpret_cast<uintptr_t>(pointer));
  munmap(pointer, it->second.nbytes);
  blocks.erase(it);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const Device device(kFake, current_device);
    if (nbytes == 0) return {nullptr, nullptr, &free_device, device};
    MemoryLock lock(memory_mutex);
    const size_t rounded = page_rounded(nbytes);
    void* address = map_pages(rounded, PROT_READ | PROT_WRITE);
    std::memset(address, 0xFF, rounded);  // NaN: memory that nothing was written to
    mprotect(address, rounded, PROT_NONE);
    blocks.emplace(reinterpret_cast<uintptr_t>(address), Block{rounded, device});
    return {address, address, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "use a tensor's copy_"); }
} device_allocator;
REGISTER_ALLOCATOR(kFake, &device_allocator);

void free_pinned(void* pointer) {
  if (pointer == nullptr) return;
  MemoryLock lock(memory_mutex);
  auto it = pinned_blocks.find(reinterpret_cast<uintptr_t>(pointer));
  munmap(pointer, it->second);
  pinned_blocks.erase(it);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_pinned, c10::kCPU};
    MemoryLock lock(memory_mutex);
    const size_t rounded = page_rounded(nbytes);
    void* address = map_pages(rounded, PROT_READ | PROT_WRITE);
    std::memset(address, 0xFF, rounded);
    pinned_blocks.emplace(reinterpret_cast<uintptr_t>(address), rounded);
    return {address, address, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
} pinned_allocator;

bool is_pinned(const void* pointer) {
  MemoryLock lock(memory_mutex);
  auto it = find_block(pinned_blocks, pointer);
  return it != pinned_blocks.end() && reinterpret_cast<uintptr_t>(pointer) < it->first + it->second;
}

// Returns a CPU tensor on the memory of a device tensor, which `access` keeps readable.
Tensor as_cpu(const Tensor& tensor, Access& access) {
  access.open(tensor.storage().data());
  const auto& storage = tensor.storage();
  auto* data = const_cast<void*>(storage.data());
  auto impl = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, c10::kCPU),
      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(impl)), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

// Streams and events

struct Copy {
  long number;
  bool to_host;
  std::function<void()> run;
};

struct Queue {
  std::deque<Copy> copies;  // put off
  long last = 0;            // number of the last thing put on the stream
};

std::map<std::pair<DeviceIndex, c10::StreamId>, Queue> queues;
c10::StreamId streams = 0;
thread_local c10::StreamId current_streams[kDevices] = {};

Queue& queue_of(const Stream& stream) { return queues[{stream.device_index(), stream.id()}]; }
Stream current_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(kFake, device), current_streams[device]);
}

// Makes the copies up to a number; all of them if the host waits, and only those to the device if the stream goes on.
void complete(Queue& queue, long until, bool host_waits) {
  std::deque<Copy> rest;
  for (auto& copy : queue.copies) {
    if (copy.number <= until && (host_waits || !copy.to_host)) {
      copy.run();
    } else {
      rest.push_back(std::move(copy));
    }
  }
  queue.copies = std::move(rest);
}

void complete_device(DeviceIndex device) {
  for (auto& [key, queue] : queues) {
    if (key.first == device) complete(queue, queue.last, true);
  }
}

// An operation on the current stream of a device follows all that was put on the stream before.
void begin_operation(DeviceIndex device) {
  auto& queue = queue_of(current_stream(device));
  complete(queue, queue.last, false);
  ++queue.last;
}

void synchronise_stream(const Stream& stream) {
  Lock lock(mutex);
  ++counters[SYNCHRONISATIONS];
  auto& queue = queue_of(stream);
  complete(queue, queue.last, true);
}

struct Event {
  Stream stream;
  long number;
  std::chrono::steady_clock::time_point time;
  int polls = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  Device exchangeDevice(Device device) const override {
    const Device old = getDevice();
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(kFake, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "the fake device has no index ", device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kFake, index_of(device)));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    return Stream(Stream::UNSAFE, Device(kFake, index_of(device)), ++streams);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream old = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Lock lock(mutex);
    delete static_cast<Event*>(*event);
    *event = new Event{stream, ++queue_of(stream).last, std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream&) const override {
    if (event == nullptr) return;
    Lock lock(mutex);
    auto* recorded = static_cast<Event*>(event);
    complete(queue_of(recorded->stream), recorded->number, false);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Lock lock(mutex);
    auto* recorded = static_cast<Event*>(event);
    if (recorded->polls++ == 0) return false;  // a device is never done at once
    complete(queue_of(recorded->stream), recorded->number, true);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Lock lock(mutex);
    ++counters[SYNCHRONISATIONS];
    auto* recorded = static_cast<Event*>(event);
    complete(queue_of(recorded->stream), recorded->number, true);
  }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    const auto seconds = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
    return std::chrono::duration<double, std::milli>(seconds).count();
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mutex);
    return queue_of(stream).copies.empty();
  }
  void synchronizeStream(const Stream& stream) const override { synchronise_stream(stream); }
  void synchronizeDevice(DeviceIndex device) const override {
    Lock lock(mutex);
    ++counters[SYNCHRONISATIONS];
    complete_device(device);
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

 private:
  static DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers: those of the CPU's generator, from a state of the device's own.

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(kFake, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& default_generator(DeviceIndex index) {
  static std::array<at::Generator, kDevices> generators{at::make_generator<Generator>(0),
                                                        at::make_generator<Generator>(1)};
  return generators.at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(kFake, index)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(kFake, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* pointer) const override {
    MemoryLock lock(memory_mutex);
    return find_block(blocks, pointer)->second.device;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    Lock lock(mutex);
    const c10::DeviceGuard guard(storage.device());
    auto fresh = device_allocator.allocate(nbytes);
    if (const size_t kept = std::min(nbytes, storage.nbytes())) {
      Access access;
      access.open(fresh.get());
      access.open(storage.data());
      std::memcpy(fresh.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
  }
} hooks;

// Operations

void resize_to(const Tensor& tensor, c10::IntArrayRef size) {
  const size_t nbytes =
      at::detail::computeStorageNbytesContiguous(size, tensor.dtype().itemsize(), tensor.storage_offset());
  if (nbytes > tensor.storage().nbytes()) hooks.resizePrivateUse1Bytes(tensor.storage(), nbytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Device(kFake)));
  return Tensor(at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(Device(kFake)));
  return Tensor(at::detail::empty_strided_generic(size, stride, &device_allocator,
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                  c10::dtype_or_default(dtype)));
}

bool is_fake(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kFake; }

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (source.numel() == 0) return target;
  Lock lock(mutex);
  const auto device = (is_fake(source) ? source : target).device().index();
  begin_operation(device);
  if (is_fake(source) && is_fake(target)) {
    ++counters[KERNELS];
    Access access;
    as_cpu(target, access).copy_(as_cpu(source, access));
    return target;
  }
  const bool to_host = is_fake(source);
  ++counters[to_host ? TO_HOST : TO_DEVICE];
  const Tensor& host = to_host ? target : source;
  // The memory of the other side may be used again before the copy is made: one to the host takes the values now, since
  // the stream's next kernel may overwrite them. One to the device reads late, and sees what the host must not yet write.
  if (non_blocking && is_pinned(host.const_data_ptr())) {
    auto& queue = queue_of(current_stream(device));
    if (to_host) {
      Access access;
      queue.copies.push_back({++queue.last, true, [target, values = as_cpu(source, access).clone()] {
                                target.copy_(values);
                              }});
    } else {
      queue.copies.push_back({++queue.last, false, [source, target] {
                                Access access;
                                as_cpu(target, access).copy_(source);
                              }});
    }
    return target;
  }
  ++counters[SYNCHRONISATIONS];
  auto& queue = queue_of(current_stream(device));
  complete(queue, queue.last, true);
  Access access;
  if (to_host) {
    target.copy_(as_cpu(source, access));
  } else {
    as_cpu(target, access).copy_(source);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  resize_to(target, source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Lock lock(mutex);
  begin_operation(self.device().index());
  ++counters[SYNCHRONISATIONS];
  auto& queue = queue_of(current_stream(self.device().index()));
  complete(queue, queue.last, true);
  Access access;
  return as_cpu(self, access).item();
}

// Operations whose result's shape depends on values: a device must tell the host.
bool has_dynamic_shape(const std::string& name) {
  static const std::set<std::string> names{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount",
                                           "aten::unique_dim", "aten::unique_consecutive"};
  return names.count(name) > 0;
}

bool takes_host_indices(const std::string& name) { return name.rfind("aten::index", 0) == 0; }

// Runs any operation by the CPU's kernel, on the device's memory.
void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Lock lock(mutex);
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  Access access;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // the device's tensors and their views as CPU tensors
  std::optional<Device> device;
  bool host_waits = has_dynamic_shape(name);
  const auto find_device = [&](const Tensor& tensor) {
    if (is_fake(tensor)) {
      TORCH_CHECK(!device || *device == tensor.device(), name, ": tensors are on ", *device, " and ", tensor.device());
      device = tensor.device();
    }
  };
  const auto convert = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (!is_fake(tensor)) {
      TORCH_CHECK(tensor.dim() == 0 || takes_host_indices(name) || !tensor.device().is_cpu(), name,
                  ": expected all tensors to be on the fake device, but one is on ", tensor.device());
      host_waits = host_waits || tensor.dim() > 0;  // indices of the host are copied to the device
      return tensor;
    }
    if (takes_host_indices(name) && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte) &&
        !pairs.empty()) {
      host_waits = true;  // a mask: its number of ones must be known
    }
    for (const auto& [original, view] : pairs) {
      if (original.is_same(tensor)) return view;
    }
    pairs.emplace_back(tensor, as_cpu(tensor, access));
    return pairs.back().second;
  };
  for (size_t i = 0; i < count; ++i) {
    const auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      find_device(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorList()) find_device(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) find_device(item.toTensor());
      }
    } else if (value.isDevice() && value.toDevice().type() == kFake) {
      device = value.toDevice();
    }
  }
  const DeviceIndex index = device && device->has_index() ? device->index() : current_device;
  begin_operation(index);
  ++counters[KERNELS];
  at::Generator drawn, from;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = convert(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> views;
      for (const Tensor& tensor : value.toTensorList()) views.push_back(convert(tensor));
      value = views;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> views;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        views.push_back(tensor ? std::optional<Tensor>(convert(*tensor)) : std::nullopt);
      }
      value = views;
    } else if (value.isDevice() && value.toDevice().type() == kFake) {
      value = Device(c10::kCPU);
    } else if (schema.arguments()[i].name() == "generator") {
      from = value.isNone() ? default_generator(index) : value.toGenerator();
      TORCH_CHECK(from.device().type() == kFake, name, ": the generator must be of the fake device");
      drawn = at::detail::createCPUGenerator();
      drawn.set_state(from.get_state());
      value = drawn;
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (drawn.defined()) from.set_state(drawn.get_state());
  for (const auto& [original, view] : pairs) {
    if (view.storage().data() == original.storage().data() && view.sizes() == original.sizes()) continue;
    resize_to(original, view.sizes());  // an `out` that was resized
    access.open(original.storage().data());
    if (view.numel() > 0) std::memcpy(original.mutable_data_ptr(), view.contiguous().const_data_ptr(), view.nbytes());
  }
  const auto restore = [&](const Tensor& result) -> Tensor {
    if (!result.defined()) return result;
    for (const auto& [original, view] : pairs) {
      if (view.is_same(result)) return original;
    }
    const c10::DeviceGuard guard(Device(kFake, index));
    auto moved = Tensor(at::detail::empty_strided_generic(result.sizes(), result.strides(), &device_allocator,
                                                          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                          result.scalar_type()));
    Access to_moved;
    as_cpu(moved, to_moved).copy_(result);
    if (result.unsafeGetTensorImpl()->is_wrapped_number()) moved.unsafeGetTensorImpl()->set_wrapped_number(true);
    return moved;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = restore(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> moved;
      for (const Tensor& tensor : value.toTensorList()) moved.push_back(restore(tensor));
      value = moved;
    } else if (!value.isNone()) {
      host_waits = true;  // a number or a bool
    }
  }
  if (host_waits) {
    ++counters[SYNCHRONISATIONS];
    auto& queue = queue_of(current_stream(index));
    complete(queue, queue.last, true);
  }
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  resize_to(self, C10_AS_INTARRAYREF_SLOW(size));
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_storage_offset(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  // torch would call their forms with `out`: that of mse_loss warns that it must be resized, and indexing by a mask
  // would count the mask's ones twice.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
  m.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

// For the loader in Python, of the thread that calls.
extern "C" long fake_device_counter(int which) { return counters[which]; }
extern "C" void fake_device_set_device(int index) { Guard().setDevice(Device(kFake, static_cast<DeviceIndex>(index))); }
extern "C" int fake_device_current_device() { return current_device; }
extern "C" long fake_device_allocated() {
  MemoryLock lock(memory_mutex);
  long nbytes = 0;
  for (const auto& [address, block] : blocks) nbytes += block.nbytes;
  return nbytes;
}
extern "C" int fake_device_count() { return kDevices; }
extern "C" void fake_device_seed(int index, unsigned long seed) { default_generator(index).set_current_seed(seed); }
extern "C" void fake_device_get_rng_state(int index, void* state, long nbytes) {
  std::memcpy(state, default_generator(index).get_state().const_data_ptr(), nbytes);
}
extern "C" void fake_device_set_rng_state(int index, const void* state, long nbytes) {
  auto tensor = default_generator(index).get_state();
  std::memcpy(tensor.mutable_data_ptr(), state, nbytes);
  default_generator(index).set_state(tensor);
}
