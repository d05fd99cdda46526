#include "io/read_piece.h"

#include <algorithm>
#include <cerrno>

namespace picaflor {

ReadPiece::ReadPiece(const ReadRun& run, std::int64_t first, std::int64_t nbytes)
    : run_(run), first_(first), nbytes_(nbytes), align_(run.align), over_(nbytes == 0) {}

std::int64_t ReadPiece::head() const { return align_ == 0 ? 0 : (run_.offset + first_) % align_; }

bool ReadPiece::next(ReadRequest& request) const {
  if (over_) return false;
  const std::int64_t start = run_.offset + first_ - head();
  std::int64_t length = head() + nbytes_;
  if (align_ != 0) length = (length + align_ - 1) / align_ * align_;
  request.fd = on_spare_ ? run_.spare : run_.fd;
  request.to = static_cast<char*>(run_.to) + first_ - head() + done_;
  request.nbytes = length - done_;
  request.offset = start + done_;
  return true;
}

void ReadPiece::feed(std::int64_t got) {
  ++calls_;
  if (got == -EINTR) return;
  if (got < 0) return fail(ReadStatus::kError, static_cast<int>(-got));
  if (got == 0) return fail(ReadStatus::kShort, 0);
  done_ += got;
  if (done_ >= head() + nbytes_) {
    over_ = true;
  } else if (align_ != 0 && done_ % align_ != 0) {
    // Reads of whole blocks end inside a block only where the file does.
    fail(ReadStatus::kShort, 0);
  }
}

std::int64_t ReadPiece::found() const { return std::clamp<std::int64_t>(done_ - head(), 0, nbytes_); }

void ReadPiece::fail(ReadStatus status, int error) {
  const bool wanted = run_.spare_use == SpareUse::kFailed || (status == ReadStatus::kError && error == EINVAL);
  if (run_.spare >= 0 && !on_spare_ && wanted) {
    on_spare_ = true;
    spare_reason_ = error;
    align_ = 0;
    done_ = 0;
    return;
  }
  status_ = status;
  error_ = error;
  over_ = true;
}

}  // namespace picaflor
